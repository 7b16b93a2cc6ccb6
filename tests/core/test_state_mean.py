"""What training changes beside the trainable parameters: each client starts from one value, the server averages."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from lightning_fedstop.core.state_mean import StateMean
from lightning_fedstop.methods import FedSAM
from tests.helpers import ToyData, ToyModule, bits, fit, make_loop, same


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float16))
        self.register_buffer("short", torch.zeros(1).to(torch.float8_e5m2))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("pointer", torch.tensor(7, dtype=torch.uint8))
        self.register_buffer("seen", torch.tensor([False, False]))
        self.register_buffer("mask", torch.tensor(-torch.inf), persistent=False)
        self.register_buffer("phase", torch.tensor([1j]))
        self.register_buffer("empty", torch.zeros(0))
        self.target = nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)


def test_means_are_weighted_and_integers_take_the_maximum_of_the_clients():
    module = Buffers()
    state = StateMean(module)
    for weight, mean, count, pointer, seen in [(1, 1.0, 6, 2, [True, False]), (3, 5.0, 9, 1, [False, False])]:
        state.reset()
        assert (module.mean.tolist(), module.count.item(), module.phase.item()) == ([0, 0], 5, 1j)
        for tensor, value in [
            (module.mean, mean),
            (module.short, mean),
            (module.phase, mean * 1j),
            (module.target, mean),
        ]:
            tensor.copy_(torch.full(tensor.shape, value))
        module.count.fill_(count)
        module.pointer.fill_(pointer)
        module.seen.copy_(torch.tensor(seen))
        state.add(state.start.changed(), weight)
    state.write()
    assert module.mean.tolist() == module.target.tolist() == [4, 4]
    assert module.short.float().tolist() == [4]
    assert (module.mean.dtype, module.short.dtype) == (torch.float16, torch.float8_e5m2)
    assert (module.count.item(), module.count.dtype) == (9, torch.int64)
    assert module.pointer.item() == 2  # it went round: no client holds the 7 of the start any more
    assert module.seen.tolist() == [True, False]
    assert module.phase.item() == 4j
    assert module.mask == -torch.inf


@pytest.mark.parametrize("order", list(itertools.permutations([(1, None), (2, 3.0), (1, None), (3, 0.1)])))
def test_clients_that_change_nothing_count_at_their_start_in_any_order(order):
    module = Buffers()
    module.mean.fill_(1.0)
    state = StateMean(module)
    for weight, value in order:
        state.reset()
        if value is not None:
            module.mean.fill_(value)
        state.add(state.start.changed(), weight)
    state.write()
    tenth = float(torch.tensor(0.1, dtype=torch.float16))
    assert module.mean.tolist() == [float(torch.tensor((2 * 1 + 2 * 3 + 3 * tenth) / 7, dtype=torch.float16))] * 2


def test_only_what_changes_is_summed_up():
    module = Buffers()
    state = StateMean(module)
    module.count.fill_(6)
    state.add(state.start.changed(), 1)
    assert list(state._sums) == ["count"]


def test_processes_agree_on_what_has_changed():
    """Another process, of weight 3, has changed all tensors; it sends what it has for each."""
    module = nn.BatchNorm1d(1)
    state = StateMean(module, module.parameters())
    module.running_mean.fill_(8.0)
    module.num_batches_tracked.fill_(3)
    state.add(state.start.changed(), 1)
    other = [torch.ones(3), torch.tensor([24.0]), torch.tensor(3.0), torch.tensor([9.0]), torch.tensor(3.0), 4]
    ops = []

    def reduce(tensor, op):
        ops.append(op)
        value = other.pop(0)
        return tensor + value if op == "sum" else torch.maximum(tensor, torch.as_tensor(value).to(tensor.dtype))

    state.write(reduce)
    assert ops == ["max", "sum", "sum", "sum", "sum", "max"]
    assert module.running_mean.item() == (8 + 24) / 4
    assert module.running_var.item() == (1 + 9) / 4  # this process has left it at 1
    assert module.num_batches_tracked == 4


def test_a_buffer_that_the_module_replaces_is_followed():
    module = nn.Module()
    module.register_buffer("average", torch.zeros(1))
    state = StateMean(module)
    for value in (2.0, 4.0):
        state.reset()
        assert module.average == 0
        module.average = module.average + value
        state.add(state.start.changed(), 1)
    state.write()
    assert module.average == 3


class Teacher(ToyModule):
    """Keeps a target network, a centre, a memory bank with a pointer, and a flag, as self-supervised modules do."""

    def __init__(self, update=None):
        super().__init__()
        self.update = update or in_place
        self.target = nn.Linear(4, 2).requires_grad_(False)
        with torch.no_grad():
            self.target.weight.fill_(0.1)
            self.target.bias.zero_()
        self.center = nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)
        self.register_buffer("queue", torch.zeros(5, 4))
        self.register_buffer("pointer", torch.tensor(3), persistent=False)
        self.fresh = nn.Parameter(torch.tensor(True), requires_grad=False)
        self.idle = nn.Parameter(torch.tensor([-torch.inf, 2.0]), requires_grad=False)

    def loss(self, batch):
        output = self.net(batch[0])
        if self.training:
            self.follow(batch, output)
        return nn.functional.cross_entropy(output - self.center.float() - self.target(batch[0]), batch[1])

    def follow(self, batch, output):
        for mine, theirs in zip(self.target.parameters(), self.net.parameters(), strict=True):
            self.update(mine, theirs.detach())
        with torch.no_grad():
            self.center.mul_(0.9).add_(output.mean(0), alpha=0.1)
            self.queue[self.pointer] = normalize(batch[0], dim=1).mean(0)
            self.pointer.add_(1).remainder_(5)
            self.fresh.fill_(False)

    def state(self):
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: tensor.detach().clone() for name, tensor in tensors.items() if name not in trained}


class Watched(Teacher):
    """Notes the state of each client at its start and end."""

    def __init__(self, update):
        super().__init__(update)
        self.started, self.ended = {}, {}

    def on_client_start(self, client):
        self.started[client] = self.state()

    def on_client_end(self, client):
        self.ended[client] = self.state()


def in_place(mine, theirs):
    mine.mul_(0.9).add_(theirs, alpha=0.1)


def by_data(mine, theirs):
    mine.data.mul_(0.9).add_(theirs, alpha=0.1)


def by_rebinding(mine, theirs):
    mine.data = mine.data * 0.9 + theirs * 0.1


def by_copying(mine, theirs):
    mine.copy_(mine * 0.9 + theirs * 0.1)


UPDATES = [in_place, by_data, by_rebinding, by_copying]
SIZES = (6, 4, 9)


def train(root, update=in_place, sizes=SIZES, kind=Teacher, **arguments):
    module = kind(update)
    rounds = {"max_rounds": 1, "clients_per_round": len(sizes), "weighting": "samples"}
    fit(root, module=module, data=ToyData(sizes, evaluated=False), **rounds | arguments)
    return module


@pytest.mark.parametrize("update", UPDATES)
def test_state_of_clients_starts_from_the_global_value_and_is_averaged(tmp_path, update):
    module = train(tmp_path, update, kind=Watched)
    start = Watched(update).state()
    assert same(module.started[2], start)
    for name, value in module.state().items():
        ends = [module.ended[client][name] for client in range(3)]
        if name == "idle":
            assert torch.equal(value, start[name])
        elif value.is_floating_point():
            assert not torch.equal(value, start[name])
            expected = sum(n * end.double() for n, end in zip(SIZES, ends, strict=True)) / sum(SIZES)
            assert torch.equal(value, expected.to(value.dtype)), name
        else:
            assert value == max(ends), name
    assert not module.fresh  # no client holds the True of the start any more
    assert not module.center.requires_grad


def test_later_rounds_start_from_the_average(tmp_path):
    module = train(tmp_path, kind=Watched, max_rounds=2)
    first = train(tmp_path, max_rounds=1)
    assert all(same(module.started[client], first.state()) for client in range(3))


@pytest.mark.parametrize("update", UPDATES)
def test_the_second_pass_of_a_sharpness_aware_step_moves_no_state(tmp_path, update):
    """With a radius near 0 the two passes of FedSAM give what one of FedAvg does, unless the second counts, too."""

    class Aside(Teacher):
        def loss(self, batch):
            super().loss(batch)
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    plain, twice = (train(tmp_path, update, kind=Aside, method=method).state() for method in (None, FedSAM(rho=1e-30)))
    for name, value in plain.items():
        torch.testing.assert_close(twice[name], value)


@pytest.mark.parametrize("update", UPDATES)
def test_threads_give_the_bits_of_one_client_after_the_other(tmp_path, update):
    alone = train(tmp_path, update, sizes=(8, 8, 4), max_rounds=2)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = train(tmp_path, update, sizes=(8, 8, 4), max_rounds=2, client_backend="threads")
    finally:
        torch.set_num_threads(threads)
    assert same(bits(alone), bits(together))


def test_a_stack_refuses_frozen_parameters_that_move(tmp_path):
    with pytest.warns(UserWarning, match=r"one client after the other instead, because .* frozen parameter center"):
        stacked = train(tmp_path, client_backend="stacked")
    assert same(bits(stacked), bits(train(tmp_path)))


def test_a_resume_takes_back_state_that_does_not_persist(tmp_path):
    """The pointer into the memory bank: in a Trainer, too, `state_dict` leaves it out."""
    whole = train(tmp_path / "whole", max_rounds=3)
    train(tmp_path / "half", max_rounds=2)
    loop, resumed = fit(
        tmp_path / "half",
        module=Teacher(in_place),
        data=ToyData(SIZES, evaluated=False),
        max_rounds=3,
        clients_per_round=3,
        weighting="samples",
        ckpt_path="last",
    )
    assert loop.current_epoch == 3
    assert same(bits(resumed), bits(whole))
    assert same(resumed.state(), whole.state())


def test_a_checkpoint_within_a_round_holds_the_state_of_its_start(tmp_path):
    class Looks(Watched):
        def on_client_end(self, client):
            super().on_client_end(client)
            before = self.state()
            with self.trainer.server.holding_theta():
                inside = self.state()
            assert same(inside, self.start)
            assert same(self.state(), before)

    module = Looks(in_place)
    module.start = module.state()
    fit(tmp_path, module=module, data=ToyData(SIZES), max_rounds=1, clients_per_round=3)
    assert len(module.ended) == 3


class Fails(Teacher):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        raise RuntimeError("broken off")


def test_a_round_that_is_broken_off_leaves_its_start(tmp_path):
    module = Fails(in_place)
    start = module.state()
    with pytest.raises(RuntimeError, match="broken off"):
        fit(tmp_path, module=module)
    assert same(module.state(), start)


class Grows(ToyModule):
    """A cache that follows the longest batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.arange(2.0), persistent=False)

    def training_step(self, batch, batch_idx):
        self.grow(len(batch[1]))
        return super().training_step(batch, batch_idx)

    def grow(self, length):
        if len(self.positions) < length:
            self.positions = torch.arange(float(length))


class Retypes(Grows):
    def grow(self, length):
        self.positions = self.positions.double()


class Appears(ToyModule):
    def training_step(self, batch, batch_idx):
        self.register_buffer("positions", torch.arange(2.0))
        return super().training_step(batch, batch_idx)


class Reweighs(ToyModule):
    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.eye(4).to_sparse())

    def training_step(self, batch, batch_idx):
        self.positions = (self.positions * 0.5).coalesce()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("backend", ["sequential", "threads"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Grows, r"changed 'positions' of Grows, its shape from \(2,\) to \(4,\), .*: give it its last shape"),
        (Retypes, r"changed 'positions' of Retypes, its dtype from torch.float32 to torch.float64, .*: give it"),
        (Reweighs, r"'positions' of Reweighs, a tensor of the layout torch.sparse_coo .* no mean .*: keep it dense"),
        (Appears, r"'positions' of Appears appeared in a client's training: give it its shape before `fit`"),
    ],
)
def test_state_that_has_no_mean_is_refused_by_name(tmp_path, kind, message, backend, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    module = kind()
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, module=module, data=ToyData([8, 8]), client_backend=backend)
    if kind is not Appears:
        assert torch.equal(module.positions.to_dense(), kind().positions.to_dense())


def test_a_buffer_may_grow_before_training_and_between_rounds(tmp_path):
    class Between(Grows):
        def on_train_epoch_start(self):
            self.grow(4)

    loop = make_loop(tmp_path)
    loop.fit(module := Between(), ToyData([8, 8]))
    assert module.positions.tolist() == [0, 1, 2, 3]
