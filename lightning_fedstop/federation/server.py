"""The server: it holds the global model, has a cohort train, and aggregates what comes back."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_fedstop.core.aggregation import RunningMean
from lightning_fedstop.core.client_states import ClientStates, Key
from lightning_fedstop.core.module_state import overwrite, untrained_tensors
from lightning_fedstop.core.processes import gather, reduce
from lightning_fedstop.core.seeding import derive_seed, torch_generator
from lightning_fedstop.core.state_mean import StateMean
from lightning_fedstop.federation.backends.choice import Backend
from lightning_fedstop.federation.cohort import Cohort, assign_clients, cohort_size
from lightning_fedstop.federation.distance import DistanceFromStart
from lightning_fedstop.federation.local_training import ClientResult, Job, local_progress
from lightning_fedstop.methods.base import Client, FederatedMethod, Federation
from lightning_fedstop.module.batches import LocalBatches, client_sizes
from lightning_fedstop.module.hooks import Hooks

Weighting = Literal["uniform", "samples"]
OnNonfinite = Literal["stop", "drop", "keep"]


@dataclass
class RoundReport:
    """Outcome of a round's training, the same on every process.

    Attributes:
        clients: the clients of the cohort that have samples.
        samples: their samples together.
        lr: the learning rate they trained at, the mean of theirs where a hook gave them different ones.
        bytes_down: what they would receive in a deployment, where each keeps its own state, all together.
        bytes_up: what they would send.
        nonfinite: the clients whose update was not finite.
        steps: the local steps taken, all together.
        skipped_steps: those that the loss scale of ``16-mixed`` skipped; ``None`` for other precisions.
        trained: how many clients' updates went into the new global model.
        seconds: time from the cohort's draw to the new global model.
        idle: of these, the mean time for which a process, or a thread of it, waited for the last client.
    """

    clients: list[int]
    samples: int
    lr: float
    bytes_down: int = 0
    bytes_up: int = 0
    nonfinite: list[int] = field(default_factory=list)
    steps: int = 0
    skipped_steps: int | None = None
    trained: int = 0
    seconds: float = 0.0
    idle: float = 0.0

    def row(self) -> dict[str, Any]:
        """Give the report's part of the record's row."""
        return {
            "lr": self.lr,
            "clients": len(self.clients),
            "trained": self.trained,
            "samples": self.samples,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "seconds_train": self.seconds,
            "seconds_idle": self.idle,
            **({} if self.skipped_steps is None else {"skipped_steps": self.skipped_steps}),
        }


@dataclass
class Tally:
    """Totals over the clients of one process in a round.

    Attributes:
        nonfinite: the clients whose update was not finite.
        rates: the learning rate of each.
        uploads: the vectors they would send.
        trained: how many updates were taken.
        steps: the local steps.
        skipped_steps: those that the loss scale skipped.
        finished: when each thread had no client left, in seconds from the round's start.
    """

    nonfinite: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    uploads: int = 0
    trained: int = 0
    steps: int = 0
    skipped_steps: int = 0
    finished: list[float] = field(default_factory=list)


class Server:
    """Runs the training of a round, on all processes together.

    Between rounds the module's parameters may be changed by anyone: :meth:`adopt` makes that the global model's change.

    Args:
        backend: trains the clients; the parameters of its trainer's module are the initial global model.
        method: the federated method.
        datamodule: gives ``num_clients``, ``client_sizes`` and ``client_dataloader``.
        cohort: who takes part.
        clients_per_round: how many: an integer, or a fraction of all clients.
        weighting: ``"uniform"``, as in the paper's equation (1), or ``"samples"``, n_m / sum n.
        on_nonfinite: what a client's update that is not finite does: end the run, be left out, or go in.
        states: keeps the method's vectors of clients.
        folder: where their file may lie.
        fabric: the processes.
        seed: the root of all random streams.
        hooks: calls ``on_client_end``.
        start_device: where the start of the global model is held; beside it by default.

    Attributes:
        theta: shape ``(d,)``; the global model, at least float32.
        distance: how far it has gone from its start.
        has_taken: whether the update of the client that has just ended goes into the round.
    """

    def __init__(
        self,
        backend: Backend,
        method: FederatedMethod,
        datamodule: Any,
        cohort: Cohort,
        clients_per_round: int | float,
        weighting: Weighting,
        on_nonfinite: OnNonfinite,
        states: ClientStates,
        folder: str | None,
        fabric: Fabric,
        seed: int,
        hooks: Hooks,
        start_device: str | None = None,
    ) -> None:
        self.backend = backend
        self.trainer = backend.trainer
        self.method = method
        self.datamodule = datamodule
        self.cohort = cohort
        self.weighting = weighting
        self.on_nonfinite = on_nonfinite
        self.fabric = fabric
        self.seed = seed
        self.hooks = hooks
        self.parameters = self.trainer.parameters
        self.sizes: list[int] = client_sizes(datamodule)
        self.num_clients = len(self.sizes)
        self.cohort_size = cohort_size(clients_per_round, self.num_clients)
        cohort.check(self.num_clients, self.cohort_size)
        vector = self.parameters.vector
        self.theta = vector.to(torch.promote_types(vector.dtype, torch.float32), copy=True)
        self._settled = self.theta
        self.distance = DistanceFromStart(start_device)
        self.has_taken = False
        self._state: StateMean | None = None
        self._moved: set[str] = set()
        self.states = states
        self._trained_on: dict[int, int] = {}
        states.open(self.theta, folder)
        self._federation = Federation(
            self.theta,
            self.sizes,
            states,
            self.parameters.sizes,
            self.trainer.settings.local_epochs,
            getattr(datamodule, "batch_size", None),
            self.trainer.solver.is_plain_sgd,
            self.reduce,
            self.gather,
        )
        method.setup(self._federation)

    def set_theta(self, theta: Tensor) -> None:
        """Make ``theta``, shape ``(d,)``, the global model and load it into the module."""
        self.theta = theta
        self.parameters.vector.copy_(theta)

    def adopt(self) -> bool:
        """Make what hooks have changed in the module's parameters the global model's; gives whether they have.

        On several processes the first one's module counts for all.

        Raises:
            ValueError: if trainable parameters were frozen, unfrozen, added, replaced or moved.
        """
        self.parameters.check_unchanged()
        theta = self._held()
        changed = theta is not self.theta
        if self.fabric.world_size > 1:
            changed = bool(self.reduce(torch.tensor(float(changed), device=theta.device), "max"))
            theta = self.fabric.broadcast(theta.cpu()) if changed else theta
        if changed:
            self.set_theta(theta.to(self.theta))
        return changed

    def _held(self) -> Tensor:
        """The global model with the changes that the module holds; ``theta`` itself where there are none."""
        vector = self.parameters.vector
        # A module in bfloat16 holds a rounded theta: where it holds just that, theta keeps its digits.
        rounded = self.theta.to(vector.dtype)
        if torch.equal(vector, rounded):
            return self.theta
        return torch.where(vector == rounded, self.theta, vector.to(self.theta.dtype))

    def settle(self) -> None:
        """Note the global model between two rounds, for checkpoints from within the next."""
        self.adopt()
        self._settled = self.theta
        self.trainer.solver.settle()

    def distance_state(self) -> dict[str, Any]:
        """State of :attr:`distance` for a checkpoint; see :meth:`DistanceFromStart.state_dict`."""
        if self._state is None and self.distance.now is not None and (held := self._held()) is not self.theta:
            self.distance.measure(held)
        return self.distance.state_dict()

    @property
    def saved_theta(self) -> Tensor:
        """Shape ``(d,)``; the global model for a checkpoint.

        One from within a client's training starts the round again when it is resumed, with its hooks: it holds what
        the round began with before them.
        """
        return self._held() if self._state is None else self._settled

    def run_round(self, round: int) -> RoundReport:
        """Draw the cohort, train its clients and aggregate; the module then holds the new global model.

        The weights and rates that the module and its optimizer hold now are those that the round starts from.

        Args:
            round: the round's number, from 1.
        """
        began = time.perf_counter()
        self._begin()
        generator = torch_generator(self.seed, "cohort", round)
        drawn = self.cohort.sample(round, self.num_clients, self.cohort_size, generator)
        clients = [client for client in drawn if self.sizes[client] > 0]
        solver = self.trainer.solver
        report = RoundReport(clients, sum(self.sizes[client] for client in clients), solver.lr)
        mean = RunningMean(self.theta)
        self._state = state = StateMean(self.trainer.module, self.parameters.parameters)
        tally = Tally()
        loss_scale = self.trainer.loss_scale
        assignment = assign_clients(clients, self.sizes, self.fabric.world_size)
        self._move_states(assignment)
        self.states.begin()
        loss_scale.begin_round()
        # A module in bfloat16 starts from a rounded theta: the rounding is no part of an update, nor of a distance.
        start = self.theta.to(self.parameters.vector.dtype).to(self.theta.dtype)
        jobs = [self._job(round, index, start) for index in assignment[self.fabric.global_rank]]
        for result in self.backend.run(jobs, state.start):
            self._accumulate(result, mean, state, tally)
            del result  # one vector less while the next client trains
        solver.end_clients()
        tally.finished = [moment - began for moment in self.backend.finished]
        self._collect(report, tally)
        self._aggregate(report, mean, state)
        self._state = None
        loss_scale.end_round()
        self.distance.next_round(round, report.trained > 0)
        self.distance.measure(self.theta)
        report.seconds = time.perf_counter() - began
        return report

    def _begin(self) -> None:
        """Let the round start from what hooks have left in the module and its optimizer."""
        self.adopt()
        self.trainer.solver.start_round()
        if self.distance.start is None:
            self.distance.begin(self.theta)
            self._federation.theta = self.theta

    def _collect(self, report: RoundReport, tally: Tally) -> None:
        """Complete the report with what the clients of all processes came to."""
        parts: list[Tally] = [part for (part,) in self.gather([tally])]
        report.nonfinite = sorted(client for part in parts for client in part.nonfinite)
        size = self.theta.numel() * self.theta.element_size()
        report.bytes_down = size * self.method.download_vectors * len(report.clients)
        report.bytes_up = size * sum(part.uploads for part in parts)
        report.trained = sum(part.trained for part in parts)
        report.steps = sum(part.steps for part in parts)
        if self.trainer.loss_scale.scaler is not None:
            report.skipped_steps = sum(part.skipped_steps for part in parts)
        rates = [rate for part in parts for rate in part.rates]
        if any(rate != report.lr for rate in rates):
            report.lr = fmean(rates)
        moments = [moment for part in parts for moment in part.finished]
        report.idle = max(moments) - sum(moments) / len(moments)

    def _move_states(self, assignment: list[list[int]]) -> None:
        """Bring each client's vectors to the process that trains it now."""
        if self.fabric.world_size == 1:
            return
        written = set(self.states.written())
        names = sorted({name for name, _ in written})
        for rank, clients in enumerate(assignment):
            for client in clients:
                before = self._trained_on.get(client, rank)
                self._trained_on[client] = rank
                if before != rank:
                    self._move([(name, client) for name in names if (name, client) in written], before, rank)

    def _move(self, keys: Sequence[Key], source: int, target: int) -> None:
        here = self.fabric.global_rank
        vectors = self.fabric.broadcast(
            {key: self.states.pop(key) for key in keys} if here == source else {}, src=source
        )
        if here == target:
            for (name, index), vector in vectors.items():
                self.states.set(name, index, vector)

    def states_dict(self) -> dict[str, Any]:
        """Vectors of all clients, from all processes."""
        merged: dict[str, Any] = {}
        for (part,) in self.gather([self.states.state_dict()]):
            for name, vectors in part.items():
                merged.setdefault(name, {}).update(vectors)
        return merged

    def changed_states(self) -> dict[Key, Tensor]:
        """Vectors that have changed since the last call, from all processes."""
        return {key: vector for (part,) in self.gather([self.states.pop_changed()]) for key, vector in part.items()}

    def loss_scales(self) -> list[dict[str, Any]]:
        """State of each process's loss scale, in order of rank; none without a scaler."""
        loss_scale = self.trainer.loss_scale
        return [] if loss_scale.scaler is None else [state for (state,) in self.gather([loss_scale.state_dict()])]

    def load_states(self, state_dict: dict[str, Any]) -> None:
        """Take the vectors of all clients back; the first process keeps them until they are needed elsewhere."""
        self.states.load_state_dict(state_dict if self.fabric.is_global_zero else {})
        self._trained_on = {client: 0 for vectors in state_dict.values() for client in vectors}

    def unsaved_state(self) -> dict[str, Tensor]:
        """State that training changes and the ``state_dict`` lacks, such as non-persistent buffers."""
        names = self._moved - self.trainer.module.state_dict().keys()
        held = untrained_tensors(self.trainer.module, self.parameters.parameters)
        return {name: tensor.detach().clone() for name, *_, tensor in held if name in names}

    def load_unsaved_state(self, state: dict[str, Tensor]) -> None:
        """Take back what :meth:`unsaved_state` gave."""
        self._moved.update(state)
        for name, *_, tensor in untrained_tensors(self.trainer.module, self.parameters.parameters):
            if name in state:
                overwrite(tensor, state[name].to(tensor.device))

    def _job(self, round: int, index: int, start: Tensor) -> Job:
        """One client's part in the round."""
        size, solver = self.sizes[index], self.trainer.solver
        weight = size if self.weighting == "samples" else 1
        client = Client(index, round, size, start, solver.lr, solver.momentum, weight, exact_theta=self.theta)

        def make_batches() -> Iterable[Any]:
            generator = torch_generator(self.seed, "batches", round, index)
            given = self.datamodule.client_dataloader(index, generator)
            return LocalBatches(given, index, type(self.datamodule).__name__)

        return Job(client, make_batches, derive_seed(self.seed, "client", round, index))

    def _accumulate(self, result: ClientResult, mean: RunningMean, state: StateMean, tally: Tally) -> None:
        """Add what came back from a client to the sums; the module holds the client's local model."""
        client = result.client
        self.parameters.check_unchanged()
        self.has_taken = result.steps > 0 and (result.finite or self.on_nonfinite == "keep")
        if self.has_taken:
            mean.add(result.delta, client.weight)
            state.add(result.state, client.weight)
            self.method.finish(client, result.delta, result.steps)
        self.hooks("on_client_end", client.index)
        local_progress.set(None)
        if not result.finite:
            tally.nonfinite.append(client.index)
        tally.rates.append(client.lr)
        tally.uploads += self.method.uploads(client)
        tally.trained += self.has_taken
        tally.steps += result.steps
        tally.skipped_steps += result.skipped

    def _aggregate(self, report: RoundReport, mean: RunningMean, state: StateMean) -> None:
        """The server step; a round that nothing came back from, or that ends the run, leaves the model as it was."""
        stops = bool(report.nonfinite) and self.on_nonfinite == "stop"
        if stops or not report.trained:
            report.trained = 0
            self.states.discard()
            state.reset()
            self.set_theta(self.theta)
            return
        self.states.commit()
        mean_delta = mean.compute(self.reduce)
        theta = self.method.aggregate(self.theta, mean_delta)
        # At a learning rate of 0 the model stays, though the mean dual of FedDyn would still move it.
        moves = self.trainer.solver.moves or bool(mean_delta.any())
        self.set_theta(theta if moves else self.theta)
        self._moved.update(state.write(self.reduce))

    @contextmanager
    def holding_theta(self) -> Iterator[None]:
        """Let the module hold the global model of a checkpoint inside the block."""
        if self._state is None:
            yield
            return
        with self.parameters.holding(self._settled), self._state.holding_start():
            yield

    def abandon_round(self) -> None:
        """Put the global model back into the module if a round was broken off."""
        local_progress.set(None)
        if self._state is not None:
            self.states.discard()
            self._state.reset()
            self._state = None
            self.set_theta(self._settled)

    def reduce(self, tensor: Tensor, op: str) -> Tensor:
        """See :func:`~lightning_fedstop.core.processes.reduce`."""
        return reduce(self.fabric, tensor, op)

    def gather(self, items: list[Any]) -> list[list[Any]]:
        """See :func:`~lightning_fedstop.core.processes.gather`."""
        return gather(self.fabric, items)
