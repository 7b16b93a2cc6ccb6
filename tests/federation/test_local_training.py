"""The local steps, on modules that were not written for the loop."""

import weakref

import pytest
import torch
from torch import nn

from lightning_fedstop.federation.cohort import ScheduledCohort
from lightning_fedstop.methods import SCAFFOLD, FedSAM
from lightning_fedstop.module.batches import length_of, limited
from tests.helpers import Seen, ToyData, ToyModule, fit, flat, one_client


def by_hand(module, batches, clip=None):
    """Plain steps of the module's own optimizer on the given batches; gives the parameters as a vector."""
    optimizer = module.configure_optimizers()
    for batch in batches:
        optimizer.zero_grad()
        module.loss(batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return flat(module)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("local_epochs", [1, 3])
def test_steps_are_those_of_a_plain_torch_loop(tmp_path, clip, local_epochs):
    module = Seen()
    one_client(tmp_path, module, local_epochs=local_epochs, gradient_clip_val=clip)
    assert [len(batch[0]) for batch in module.batches] == [4, 2] * local_epochs
    torch.testing.assert_close(flat(module), by_hand(ToyModule(), module.batches, clip), rtol=0, atol=1e-7)


def test_each_epoch_has_every_sample_once_in_another_order(tmp_path):
    module = Seen()
    one_client(tmp_path, module, local_epochs=2, sizes=(9,))
    epochs = [torch.cat([x for x, _ in module.batches[i : i + 3]]) for i in (0, 3)]
    assert not torch.equal(*epochs)
    assert torch.equal(*(epoch.sort(0).values for epoch in epochs))


class ReturnsDict(ToyModule):
    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "extra": 1}


class ForgetsTheLoss(ToyModule):
    def training_step(self, batch, batch_idx):
        return {"los": self.loss(batch)}


class Skips(ToyModule):
    def training_step(self, batch, batch_idx):
        return None


def test_a_dict_without_loss_is_refused_and_none_is_warned_of_once(tmp_path, recwarn):
    with pytest.raises(TypeError, match="must return a dict with 'loss', got one with 'los'"):
        one_client(tmp_path, ForgetsTheLoss())
    one_client(tmp_path, Skips(), local_epochs=2)
    assert len([w for w in recwarn if "`training_step` returned None" in str(w.message)]) == 1


class TakesBatchAlone(ToyModule):
    def training_step(self, batch):
        return self.loss(batch)


class TakesAnything(ToyModule):
    def training_step(self, *args, **kwargs):
        return self.loss(args[0])


class OwnStep(ToyModule):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


class OwnBackward(ToyModule):
    def backward(self, loss):
        self.called = True
        (2 * loss).backward()
        for parameter in self.parameters():
            parameter.grad /= 2


class OwnClip(ToyModule):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm="norm")


class ReplacesGradients(ToyModule):
    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad = parameter.grad.clone()


class SetsToNone(ToyModule):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=True)


class Lazy(ToyModule):
    def __init__(self):
        super().__init__(net=nn.Identity())

    def configure_model(self):
        self.net = ToyModule().net


SAME = [ReturnsDict, TakesBatchAlone, TakesAnything, OwnStep, OwnBackward, OwnClip, ReplacesGradients, SetsToNone, Lazy]


@pytest.mark.parametrize("kind", SAME)
def test_modules_of_other_forms_train_to_the_same_bits(tmp_path, kind):
    modules = [kind(), ToyModule()]
    for module in modules:
        one_client(tmp_path, module, gradient_clip_val=0.1)
    torch.testing.assert_close(flat(modules[0]), flat(modules[1]), rtol=0, atol=1e-8)


class Long(ToyModule):
    """So many parameters that their norm, added up in float32, is 6e-5 short; the gradient is the parameters."""

    def __init__(self):
        super().__init__(net=nn.Identity())
        self.weight = nn.Parameter(torch.randn(3_400_000, generator=torch.Generator().manual_seed(0)))

    def loss(self, batch):
        return self.weight.square().sum() / 2

    def on_before_backward(self, loss):
        self.points = [*getattr(self, "points", []), self.weight.detach().clone()]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class LongOwnClip(Long, OwnClip):
    pass


@pytest.mark.parametrize("kind", [Long, LongOwnClip])
def test_clip_and_perturbation_of_a_large_model_are_as_long_as_asked(tmp_path, kind):
    module = kind()
    start = flat(module).double()
    one_client(tmp_path, module, sizes=(4,), gradient_clip_val=0.5, method=FedSAM(0.25), enable_checkpointing=False)
    assert float((module.points[1].double() - start).norm()) == pytest.approx(0.25, rel=1e-6)
    assert float((flat(module).double() - start).norm()) == pytest.approx(0.5, rel=1e-6)


def test_own_clip_by_value(tmp_path):
    class ByValue(Seen):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, gradient_clip_val, "value")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = ByValue()
    one_client(tmp_path, module, gradient_clip_val=1e-3, sizes=(4,))
    assert (flat(module) - flat(ToyModule())).abs().max() == pytest.approx(1e-3, rel=1e-3)


class SkipsShort(Seen):
    """Skips the short batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if len(batch[0]) == 4 else None


class SkipsShortOwnStep(SkipsShort, OwnStep):
    pass


class SkipsShortInDict(SkipsShort):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx)}


@pytest.mark.parametrize("kind", [SkipsShort, SkipsShortOwnStep, SkipsShortInDict])
def test_a_skipped_batch_moves_nothing_not_even_by_momentum(tmp_path, kind):
    module = kind()
    one_client(tmp_path, module, local_epochs=2)
    full = [batch for batch in module.batches if len(batch[0]) == 4]
    assert len(full) == 2
    torch.testing.assert_close(flat(module), by_hand(ToyModule(), full), rtol=0, atol=1e-8)


def test_a_module_that_skips_everything_changes_nothing(tmp_path):
    class Skips(ToyModule):
        def training_step(self, batch, batch_idx):
            return None

    module = Skips()
    loop = one_client(tmp_path, module)
    assert torch.equal(flat(module), flat(ToyModule()))
    assert loop.current_epoch == 1


def test_minus_one_ends_the_local_epoch(tmp_path):
    class Stops(Seen):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 1 else torch.ones(2)

    module = Stops()
    one_client(tmp_path, module, local_epochs=2)
    assert [len(batch[0]) for batch in module.batches] == [4, 4]


def test_a_loss_that_is_none_of_the_allowed_is_refused(tmp_path):
    class Wrong(ToyModule):
        def training_step(self, batch, batch_idx):
            return 1.5

    with pytest.raises(TypeError, match="must return a loss tensor, a dict with 'loss', or None, got float"):
        one_client(tmp_path, Wrong())


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
        lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
        lambda p: torch.optim.Rprop(p, lr=0.01),
    ],
)
def test_any_optimizer_steps_as_in_a_plain_loop(tmp_path, optimizer):
    class Other(Seen):
        def configure_optimizers(self):
            return optimizer(self.parameters())

        def training_step(self, batch, batch_idx):
            self.batches = [b for b in self.batches if b is not batch]  # LBFGS asks several times
            return super().training_step(batch, batch_idx)

    module, reference = Other(), Other()
    one_client(tmp_path, module, local_epochs=2)
    solver = reference.configure_optimizers()
    for batch in module.batches:

        def closure(batch=batch):
            solver.zero_grad()
            loss = reference.loss(batch)
            loss.backward()
            return loss

        solver.step(closure)
    torch.testing.assert_close(flat(module), flat(reference), rtol=0, atol=1e-7)


def test_clients_start_from_the_global_model_with_fresh_optimizer_state(tmp_path):
    """The second client's model is what it would be alone: nothing of the first one is left."""
    alone, models = {}, {}

    class Notes(ToyModule):
        def on_client_end(self, client):
            self.into[client] = flat(self)

    for clients, into in (([0], alone), ([1], alone), ([0, 1], models)):
        module = Notes(net=nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2)))
        torch.manual_seed(0)
        for layer in (module.net[0], module.net[3]):
            layer.reset_parameters()
        module.into = into
        fit(tmp_path, module=module, data=ToyData([8, 7]), max_rounds=1, cohort=ScheduledCohort([clients]))
    assert torch.equal(models[0], alone[0])
    assert torch.equal(models[1], alone[1])
    assert not torch.equal(models[0], models[1])


@pytest.mark.parametrize("sizes", [(1,), (5,)])
def test_a_batch_of_one_sample(tmp_path, sizes):
    module = Seen()
    one_client(tmp_path, module, sizes=sizes)
    assert len(module.batches[-1][0]) == 1
    assert torch.isfinite(flat(module)).all()


@pytest.mark.parametrize(
    ("limit", "batches"), [(None, 5), (2, 2), (9, 5), (0.5, 2), (0.01, 1), (1.0, 5), (0, 0), (0.0, 0)]
)
def test_limit_train_batches(tmp_path, limit, batches):
    module = Seen()
    one_client(tmp_path, module, sizes=(20,), limit_train_batches=limit, local_epochs=2)
    assert len(module.batches) == 2 * batches


@pytest.mark.parametrize("sizes", [(9,), (1, 9)])
def test_batchnorm_and_a_batch_of_one_sample(tmp_path, sizes):
    """Refused before anything is written, or left out if asked for: then its hooks are not called either."""

    class Norm(Seen):
        def __init__(self):
            super().__init__(net=nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))

        def on_train_batch_start(self, batch, batch_idx):
            assert len(batch[0]) > 1

    with pytest.raises(ValueError, match=r"Norm has BatchNorm, .* `drop_single_sample_batches=True`"):
        one_client(tmp_path, Norm(), sizes=sizes)
    assert not list(tmp_path.iterdir())
    module = Norm()
    one_client(tmp_path, module, sizes=sizes, clients_per_round=len(sizes), drop_single_sample_batches=True)
    assert [len(batch[0]) for batch in module.batches] == [4, 4]
    assert module.net[0].num_batches_tracked == 2


def test_limited_needs_a_length_for_a_share_alone():
    assert list(limited(iter(range(5)), 3)) == [0, 1, 2]
    assert list(limited(iter(range(5)), 1.0)) == [0, 1, 2, 3, 4]
    assert list(limited(iter(range(5)), 0.0)) == []
    assert length_of(iter([])) is None
    with pytest.raises(ValueError, match="A share of the batches"):
        limited(iter(range(5)), 0.5)


def test_batches_reach_the_step_through_the_transfer_hooks(tmp_path):
    class Shifts(Seen):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] * 0, batch[1]]

    module = Shifts()
    one_client(tmp_path, module)
    assert not any(x.any() for x, _ in module.batches)


def test_a_clients_vectors_are_dropped_before_the_next_client(tmp_path):
    alive = []

    class Watched(SCAFFOLD):
        def start(self, client):
            alive.append([reference() is not None for reference in made])
            super().start(client)
            made.append(weakref.ref(client.vectors["correction"]))

    made = []
    fit(tmp_path, method=Watched(), clients_per_round=3, max_rounds=1)
    assert alive == [[], [False], [False, False]]
