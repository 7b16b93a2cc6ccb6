"""Whole fits: what is trained, on whom, and how it is evaluated."""

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fedstop.federation.cohort import ScheduledCohort
from lightning_fedstop.methods import FedAvg
from lightning_fedstop.records import read_rounds
from tests.helpers import Deep, ToyData, ToyModule, bits, check_case, fit, flat, make_loop, run_case, same

ONE_DIMENSION = {  # by hand: two clients, gradients A (x - b), two steps of .1 from 1
    "input": {"A": [1.0, 2.0], "b": [2.0, -1.0], "rounds_selected": [[0, 1]] * 2, "theta0": 1.0, "K": 2, "lr": 0.1},
    "expected": [
        {"client_models": {"0": [1.19], "1": [0.28]}, "theta": [0.735]},
        {"client_models": {"0": [0.97535], "1": [0.1104]}, "theta": [0.542875]},
    ],
}


def test_two_rounds_of_federated_averaging_by_hand(tmp_path):
    check_case(ONE_DIMENSION, run_case(ONE_DIMENSION, FedAvg(), tmp_path))


@pytest.mark.parametrize(("weighting", "weights"), [("uniform", [1, 1]), ("samples", [8, 3])])
def test_weighting(tmp_path, weighting, weights):
    models = {}
    note = LambdaCallback()
    note.on_client_end = lambda loop, module, client: models.update({client: flat(module).double()})
    _, module = fit(tmp_path, note, data=ToyData([8, 3]), max_rounds=1, weighting=weighting)
    expected = (weights[0] * models[0] + weights[1] * models[1]) / sum(weights)
    torch.testing.assert_close(flat(module).double(), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("sizes", "clients", "expected"), [([6], 1, 1), ([4, 4, 4], 3, 3), ([4] * 5, 0.1, 1)])
def test_numbers_of_clients(tmp_path, sizes, clients, expected):
    loop, _ = fit(tmp_path, data=ToyData(sizes), clients_per_round=clients)
    assert [row["clients"] for row in read_rounds(f"{loop.log_dir}/metrics.csv")] == [str(expected)] * 3


def test_more_clients_than_there_are_are_refused_before_training(tmp_path):
    module = ToyModule()
    with pytest.raises(ValueError, match="at most the number of clients, 3, got 5"):
        fit(tmp_path, module=module, data=ToyData([2, 2, 2]), clients_per_round=5)
    assert same(bits(module), bits(ToyModule()))


def test_clients_without_samples_take_no_part(tmp_path):
    runs = []
    for sizes, schedule in (([0, 6, 0, 4], [[0, 1, 2, 3]]), ([6, 4], [[0, 1]])):
        data = ToyData(sizes)
        _, module = fit(
            tmp_path, module=(m := ToyModule()), data=data, cohort=ScheduledCohort(schedule), local_epochs=1
        )
        assert module is m
        runs.append(read_rounds(f"{m.trainer.log_dir}/metrics.csv")[0])
    assert runs[0]["clients"] == "2"
    assert runs[0]["samples"] == "10"


def test_a_round_of_empty_clients_changes_nothing(tmp_path):
    module = Deep()
    loop, _ = fit(tmp_path, module=module, data=ToyData([0, 0, 6]), cohort=ScheduledCohort([[0, 1]]), max_rounds=2)
    assert same(bits(module), bits(Deep()))
    rows = read_rounds(f"{loop.log_dir}/metrics.csv")
    assert [(row["clients"], row["samples"], row["train_loss"]) for row in rows] == [("0", "0", "")] * 2


@pytest.mark.parametrize(("every", "rounds"), [(None, []), (1, [1, 2, 3, 4]), (2, [2, 4]), (9, [])])
def test_check_val_every_n_round(tmp_path, every, rounds):
    loop, _ = fit(tmp_path, max_rounds=4, check_val_every_n_round=every)
    rows = read_rounds(f"{loop.log_dir}/metrics.csv")
    assert [int(row["round"]) for row in rows if row["val_loss"]] == rounds


@pytest.mark.parametrize(("every", "rounds"), [(None, []), (1, [1, 2, 3, 4]), (3, [3])])
def test_check_test_every_n_round_fills_the_record_and_changes_no_bit(tmp_path, every, rounds):
    reference, expected = fit(tmp_path / "reference", max_rounds=4)
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    loop, module = fit(tmp_path, *[saver] * bool(rounds), max_rounds=4, check_test_every_n_round=every)
    rows = read_rounds(f"{loop.log_dir}/metrics.csv")
    assert [int(row["round"]) for row in rows if row["test_loss"]] == rounds
    assert same(bits(module), bits(expected))
    assert loop.summary["test"] == reference.summary["test"]
    if rounds and rounds[-1] == 4:
        assert float(rows[-1]["test_loss"]) == pytest.approx(loop.summary["test"]["test_loss"])


def test_check_test_every_n_round_is_checked(tmp_path):
    with pytest.raises(ValueError, match="`check_test_every_n_round` must be an integer of at least 1, got 0"):
        fit(tmp_path, check_test_every_n_round=0)


@pytest.mark.parametrize(("limit", "batches"), [(None, 3), (1, 1), (0.67, 2), (0, 0)])
def test_limits_of_evaluation(tmp_path, limit, batches):
    seen = {"val": 0, "test": 0}

    class Counts(ToyModule):
        def validation_step(self, batch, batch_idx):
            seen["val"] += 1

        def test_step(self, batch, batch_idx):
            seen["test"] += 1

    fit(tmp_path, module=Counts(), max_rounds=2, limit_val_batches=limit, limit_test_batches=limit)
    assert seen == {"val": 2 * batches, "test": batches}


class NoData(LightningDataModule):
    """Clients alone: nothing else of a data module is defined."""

    def __init__(self):
        super().__init__()
        self.toy = ToyData(evaluated=False)
        self.client_sizes, self.num_clients = self.toy.client_sizes, self.toy.num_clients

    def client_dataloader(self, client, generator):
        return self.toy.client_dataloader(client, generator)


class TrainsOnly(LightningModule):
    def __init__(self):
        super().__init__()
        self.toy = ToyModule()

    def training_step(self, batch, batch_idx):
        return self.toy.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("module", [ToyModule, TrainsOnly])
@pytest.mark.parametrize("data", [NoData, ToyData])
def test_evaluation_needs_data_and_a_step(tmp_path, module, data):
    loop, _ = fit(tmp_path, module=module(), data=data())
    assert bool(loop.summary["test"]) is (module is ToyModule and data is ToyData)


def test_the_modules_own_loaders_serve_where_the_data_module_has_none(tmp_path):
    class Owns(ToyModule):
        def val_dataloader(self):
            return ToyData().val_dataloader()

    loop, _ = fit(tmp_path, module=Owns(), data=NoData())
    assert "val_loss" in loop.callback_metrics


def test_validate_and_test(tmp_path, capsys):
    loop, module = fit(tmp_path)
    expected = loop.summary["test"]["test_loss"]
    alone = make_loop(tmp_path / "alone")
    assert alone.test(module, ToyData())[0]["test_loss"] == pytest.approx(expected)
    assert "test_loss" in capsys.readouterr().out
    assert alone.validate(module, ToyData(), verbose=False) == [{"val_loss": pytest.approx(expected)}]
    assert capsys.readouterr().out == ""
    assert loop.test(verbose=False)[0]["test_loss"] == pytest.approx(expected)
    for path in ("last", "best", loop.summary["checkpoint"]):
        assert loop.test(ToyModule(), ToyData(), ckpt_path=path)[0]["test_loss"] == pytest.approx(expected)
    assert not (tmp_path / "alone").exists()
    with pytest.raises(FileNotFoundError, match="needs a ModelCheckpoint that has saved"):
        alone.test(module, ToyData(), ckpt_path="best")


@pytest.mark.parametrize(
    "arguments", [(TrainsOnly(), ToyData()), (ToyModule(), ToyData(evaluated=False)), (ToyModule(),)]
)
def test_nothing_to_evaluate_is_an_error(tmp_path, arguments):
    with pytest.raises(MisconfigurationException, match=r"There is nothing to evaluate: .* needs a `test_step`"):
        make_loop(tmp_path).test(*arguments)
    with pytest.raises(TypeError, match="got NoneType"):
        make_loop(tmp_path).test()


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end"])
def test_a_module_may_be_rebuilt_for_export_once_training_is_over(tmp_path, hook):
    """Removing a parametrization, merging adapters or pruning for good: a Trainer lets hooks do so at the end."""
    module = ToyModule()
    layer = next(m for m in module.modules() if isinstance(m, torch.nn.Linear))
    torch.nn.utils.parametrizations.weight_norm(layer)
    merge = LambdaCallback(**{hook: lambda *_: torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")})
    loop = make_loop(tmp_path, callbacks=[merge])
    loop.fit(module, ToyData())
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert loop.current_epoch == loop.max_rounds
    assert (tmp_path / "lightning_logs/version_0/summary.json").exists()
