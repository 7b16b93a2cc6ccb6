"""What users of such tools tripped over, as tests: the runs. ``test_inputs.py`` holds what goes in.

=====  ============================================================================  ==========================
row    kind                                                                          tests
=====  ============================================================================  ==========================
1      one client's update is not finite                                             ``test_01_*``
2      a run ended by an exception is resumed                                        ``test_02_*``
3      growth below the threshold early, above it when the minimum is reached        ``test_03_*``
4      two rules in one run, through a resume                                        ``test_04_*``
5      a partition that cannot be made                                               ``test_inputs.test_05_*``
6      clients without samples                                                       ``test_06_*``
7      batches of one sample and BatchNorm                                           ``test_07_*``
8      BatchNorm's statistics                                                        ``test_08_*``
9      labels of shape (n, 1)                                                        ``test_inputs.test_09_*``
10     images smaller than the backbone takes                                        ``test_inputs.test_10_*``
11     pretrained weights without a network                                          ``test_inputs.test_11_*``
12     a callback's arguments in a configuration                                     ``test_inputs.test_12_*``
13     the same command twice                                                        ``test_inputs.test_13_*``
14     more clients in a round than there are, or a share of less than one           ``test_14_*``
15     the same seed                                                                 ``test_15_*``
=====  ============================================================================  ==========================
"""

import math

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedstop.data import DirichletSkew, FederatedDataModule, QuantitySkew
from lightning_fedstop.federation.cohort import ScheduledCohort
from lightning_fedstop.methods import SCAFFOLD, FedAvg, FedDyn, FedLESAM
from lightning_fedstop.stopping import StoppingReason, TaskVectorEarlyStopping
from tests.helpers import Deep, ToyData, ToyModule, bits, fit, flat, make_loop, same
from tests.stopping.walkers import Walker, trainer


class Spoilt(ToyModule):
    """Client 1 goes wrong in round 2, in one of several ways."""

    def __init__(self, how):
        super().__init__()
        self.how, self.client, self.steps = how, None, 0

    def on_client_start(self, client):
        self.client, self.steps = client, 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.steps += 1
        if self.client != 1 or self.current_epoch != 1:
            return loss
        if self.how == "gradient":  # the loss itself is finite
            return loss + (self.net.weight * 0).sum().sqrt()
        if self.how == "last batch":
            return loss * float("nan") if self.steps == 2 else loss
        return loss * float(self.how)


@pytest.mark.parametrize("how", ["nan", "inf", "gradient", "last batch"])
@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD, FedDyn])
def test_01_a_client_that_is_not_finite_ends_the_run_and_is_named(tmp_path, how, method):
    module = Spoilt(how)
    loop, _ = fit(
        tmp_path,
        module=module,
        data=ToyData([8, 8, 8]),
        method=method(),
        max_rounds=50,
        clients_per_round=3,
    )
    assert loop.summary["stop_round"] == 2
    assert "client 1 in round 2 is not finite" in loop.summary["stop_reason"]
    assert flat(module).isfinite().all()


def test_01_a_model_that_has_diverged_ends_the_run_too(tmp_path):
    rule = TaskVectorEarlyStopping()
    data = ToyData([8, 8, 8])
    given = {"max_rounds": 50, "clients_per_round": 3, "on_nonfinite": "keep"}
    loop, _ = fit(tmp_path, rule, module=Spoilt("nan"), data=data, **given)
    assert loop.current_epoch == 2
    assert rule.stopping_reason is StoppingReason.DIVERGED


class FailsAfter(Callback):
    """Raises in a round, before its clients train or in the middle of them."""

    def __init__(self, round, within=False):
        self.round, self.within = round, within

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == self.round and not self.within:
            raise ConnectionError("pulled the plug")

    def on_client_end(self, trainer, module, client):
        if trainer.current_epoch == self.round and self.within:
            raise ConnectionError("pulled the plug")


@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD, FedDyn, lambda: FedLESAM(0.05)])
@pytest.mark.parametrize(("round", "within"), [(1, False), (4, False), (4, True), (6, False)])
def test_02_a_resumed_run_is_the_undisturbed_one(tmp_path, method, round, within):
    def rule():
        # Counts from round 3 on, so that the run is broken off in the midst of counting.
        return TaskVectorEarlyStopping(threshold=0.6, patience=5)

    given = {"max_rounds": 12, "clients_per_round": 3}
    whole, whole_module = fit(tmp_path / "whole", first := rule(), module=Deep(), method=method(), **given)
    with pytest.raises(ConnectionError):
        fit(tmp_path / "broken", rule(), FailsAfter(round, within), module=Deep(), method=method(), **given)
    more, module = fit(tmp_path / "broken", second := rule(), module=Deep(), method=method(), ckpt_path="last", **given)
    assert more.current_epoch == whole.current_epoch
    assert 3 < more.current_epoch < 12
    assert second.criterion.state_dict().keys() == first.criterion.state_dict().keys()
    assert second.state_dict()["wait_count"] == first.state_dict()["wait_count"] == 5
    assert same(bits(module), bits(whole_module))
    assert more.summary["parameters_hash"] == whole.summary["parameters_hash"]


def walk(growths):
    """Distances whose relative growth is as given, from round 2 on."""
    distances = [1.0]
    for growth in growths:
        distances.append(distances[-1] * (1 + growth))
    return distances


QUIET_THEN_WILD = [0.5, *[0.001] * 5, *[0.05] * 17]  # growth below .01 in rounds 3 to 7


class FederatedWalker(Walker):
    """Walks in the loop, where the data module has the data."""

    train_dataloader = LightningModule.train_dataloader


def walked(tmp_path, growths, **arguments):
    rule = TaskVectorEarlyStopping(threshold=0.01, patience=3, min_rounds=arguments.pop("rule_min", 0))
    data = ToyData([4, 4], evaluated=False)
    loop, _ = fit(
        tmp_path, rule, module=FederatedWalker(walk(growths)), data=data, **{"max_rounds": len(growths) + 1} | arguments
    )
    return loop, rule


@pytest.mark.parametrize("minimum", ["min_rounds", "rule_min"])
@pytest.mark.parametrize(
    ("growths", "stop"),
    [
        (QUIET_THEN_WILD, None),
        (QUIET_THEN_WILD[:19] + [0.001] * 5, 23),  # below again from round 21 on
        ([0.5, *[0.001] * 23], 20),  # below all along: at the minimum, not after another three
        ([0.5, *[0.05] * 16, *[0.001] * 7], 21),
    ],
)
def test_03_a_stop_wished_early_is_decided_anew(tmp_path, minimum, growths, stop):
    loop, rule = walked(tmp_path, growths, **{minimum: 20})
    assert loop.current_epoch == (stop or len(growths) + 1)
    assert rule.stop_round == stop


def test_03_in_a_trainer():
    rule = TaskVectorEarlyStopping(threshold=0.01, patience=3, min_rounds=20)
    fitted = trainer(rule, max_epochs=24)
    fitted.fit(Walker(walk(QUIET_THEN_WILD)))
    assert (fitted.current_epoch, rule.stop_round) == (24, None)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("broken_after", [None, 3, 6])
@pytest.mark.parametrize(
    ("growths", "stop", "first"),
    [([0.5, *[0.05] * 12], 4, 0), ([0.5, *[0.2] * 3, *[0.005] * 8], 7, 0), ([0.5, 0.05, *[0.005] * 9], 4, 0)],
)
def test_04_the_first_of_two_rules_ends_the_run(tmp_path, order, broken_after, growths, stop, first):
    def rules():
        return [TaskVectorEarlyStopping(0.1, 2), TaskVectorEarlyStopping(0.01, 5)][::order]

    def run(*more, **arguments):
        made = rules()
        loop = make_loop(tmp_path, *made, *more, max_rounds=len(growths) + 1, **arguments)
        return loop, made

    loop, made = run(*([FailsAfter(broken_after)] if broken_after and broken_after < stop else []))
    assert made[0].state_key != made[1].state_key
    data, module = ToyData([4, 4], evaluated=False), FederatedWalker(walk(growths))
    if broken_after and broken_after < stop:
        with pytest.raises(ConnectionError):
            loop.fit(module, data)
        loop, made = run()
        loop.fit(FederatedWalker(walk(growths)), data, ckpt_path="last")
    else:
        loop.fit(module, data)
    loose, strict = made[::order]
    assert (loop.current_epoch, loose.stop_round, strict.stop_round) == (stop, stop, None)
    growth = [math.inf, *growths[: stop - 1]]
    count = 0
    for value in growth:
        count = count + 1 if value < 0.01 else 0
    assert strict.state_dict()["wait_count"] == count


def test_04_two_rules_of_the_same_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`callbacks` holds two with the same arguments, whose states would mix"):
        make_loop(tmp_path, TaskVectorEarlyStopping(0.1, 2), TaskVectorEarlyStopping(0.1, 2))
    make_loop(tmp_path, TaskVectorEarlyStopping(0.1, 2), EarlyStopping("val_loss"))


@pytest.mark.parametrize("sizes", [[0, 6, 4], [6, 0, 0], [0, 0, 1]])
@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD])
def test_06_clients_without_samples_are_skipped_with_a_warning(tmp_path, sizes, method):
    with pytest.warns(UserWarning, match=rf"{sizes.count(0)} of 3 clients .*skipped"):
        loop, module = fit(tmp_path, data=ToyData(sizes), clients_per_round=3, method=method())
    assert loop.current_epoch == 3
    assert flat(module).isfinite().all()


def test_06_by_a_quantity_skew(tmp_path):
    tensors = TensorDataset(torch.randn(40, 4), torch.arange(40) % 2)
    ordinary = type(ToyData()).from_datasets(tensors, batch_size=4)
    data = FederatedDataModule.from_datamodule(ordinary, 12, QuantitySkew(0.05, min_samples=0))
    with pytest.warns(UserWarning, match="of 12 clients"):
        fit(tmp_path, data=data, clients_per_round=12)
    assert 0 in data.client_sizes
    assert sum(data.client_sizes) == 40


def test_06_nobody_with_a_sample_is_refused(tmp_path):
    with pytest.raises(ValueError, match="None of the 2 clients of ToyData has a sample"):
        fit(tmp_path, data=ToyData([0, 0]))


def normed():
    return ToyModule(net=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))


@pytest.mark.parametrize(("size", "batch"), [(9, 4), (5, 4), (1, 4), (3, 1), (7, 6)])
def test_07_a_batch_of_one_is_left_out_by_option_and_refused_without_it(tmp_path, size, batch):
    data = ToyData([size, 8], batch_size=batch)
    if batch > 1:
        loop, module = fit(tmp_path, module=normed(), data=data, drop_single_sample_batches=True)
        assert loop.current_epoch == 3
        assert flat(module).isfinite().all()
    with pytest.raises(ValueError, match=r"client 0 with \d samples\) have a batch of 1 .*`drop_single_sample_batches"):
        fit(tmp_path, module=normed(), data=data)
    # Without BatchNorm nothing is wrong with a batch of one.
    assert fit(tmp_path, data=data)[0].current_epoch == 3


def test_08_statistics_are_averaged_and_no_part_of_the_distance(tmp_path):
    class Notes(Callback):
        def __init__(self):
            self.local = []

        def on_client_end(self, trainer, module, client):
            self.local.append(bits(module))

    torch.manual_seed(0)
    module, notes, rule = normed(), Notes(), TaskVectorEarlyStopping()
    start = flat(module)
    fit(tmp_path, notes, rule, module=module, data=ToyData([8, 16]), max_rounds=1)
    after = bits(module)
    one, other = notes.local
    for name in ("net.1.running_mean", "net.1.running_var"):
        torch.testing.assert_close(after[name], (one[name] + other[name]) / 2)
    tracked = "net.1.num_batches_tracked"
    assert after[tracked].dtype == torch.int64
    assert after[tracked] == max(one[tracked], other[tracked]) == 4
    distance = (flat(module).double() - start.double()).norm().item()
    assert rule.criterion.state_dict()["distance"] == pytest.approx(distance, rel=1e-6)


@pytest.mark.parametrize(
    ("asked", "clients", "size"), [(0.1, 5, 1), (0.01, 3, 1), (0.5, 5, 2), (1.0, 3, 3), (3, 3, 3), (0.999, 3, 3)]
)
def test_14_how_many_take_part(tmp_path, asked, clients, size):
    class Counts(Callback):
        seen = 0

        def on_client_end(self, trainer, module, client):
            self.seen += 1

    fit(tmp_path, counts := Counts(), data=ToyData([4] * clients), clients_per_round=asked, max_rounds=2)
    assert counts.seen == 2 * size


@pytest.mark.parametrize("asked", [5, 4, 0, -1, 0.0, 1.5, float("nan"), float("inf"), True, "2", None])
def test_14_what_cannot_be_is_refused_before_anything_is_trained_or_written(tmp_path, asked):
    module = ToyModule()
    with pytest.raises(ValueError, match="`clients_per_round` must be"):
        fit(tmp_path, module=module, data=ToyData([4, 4, 4]), clients_per_round=asked)
    assert same(bits(module), bits(ToyModule()))
    assert list(tmp_path.iterdir()) == []


class Cohorts(Callback):
    """Notes who trained in which round."""

    def __init__(self):
        self.seen = []

    def on_client_start(self, trainer, module, client):
        self.seen.append((trainer.current_epoch, client))


def seeded(tmp_path, workers=0, partition_path=None, seed=5, **arguments):
    class Wrapped(ToyData):
        def train_dataloader(self):
            return DataLoader(self.dataset(0, 60), 8, num_workers=workers)

    from lightning_fedstop.data import Federated

    data = Federated(Wrapped([60]), 6, skew=DirichletSkew(0.4), seed=3, partition_path=partition_path)
    cohorts = Cohorts()
    loop, _ = fit(tmp_path, cohorts, module=Deep(), data=data, seed=seed, drop_single_sample_batches=True, **arguments)
    return loop.summary["parameters_hash"], cohorts.seen, data


def test_15_the_same_seed_gives_the_same_bits_and_schedule(tmp_path):
    first, schedule, data = seeded(tmp_path)
    path = data.partition.save(tmp_path / "partition.npz")
    for arguments in ({}, {"partition_path": path}, {"check_val_every_n_round": None}, {"workers": 1}):
        torch.manual_seed(torch.seed() % 999)
        again, same_schedule, _ = seeded(tmp_path, **arguments)
        assert (again, same_schedule) == (first, schedule), arguments
    other, other_schedule, _ = seeded(tmp_path, seed=6)
    assert other != first
    assert other_schedule != schedule


@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD])
def test_15_the_order_of_the_clients_does_not_matter(tmp_path, method):
    class Backwards(ScheduledCohort):
        def sample(self, *args, **kwargs):
            return super().sample(*args, **kwargs)[::-1]

    schedule = [[0, 2, 4], [1, 2, 3]]
    one, other = (
        fit(tmp_path, module=Deep(), cohort=cohort(schedule), method=method())[0].summary["parameters_hash"]
        for cohort in (ScheduledCohort, Backwards)
    )
    assert one == other
