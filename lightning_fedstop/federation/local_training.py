"""The one local training loop of the package."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fedstop.core.aggregation import RunningMean
from lightning_fedstop.core.module_state import ModuleState
from lightning_fedstop.core.parameters import FlatParameters, is_finite, norm
from lightning_fedstop.core.seeding import seeded
from lightning_fedstop.methods.base import Client, FederatedMethod, LocalStep
from lightning_fedstop.methods.momentum import Motion
from lightning_fedstop.module.batches import BatchTransfer, limited, limited_length
from lightning_fedstop.module.hooks import OPTIMIZER_HOOKS, Hooks
from lightning_fedstop.module.logged import ResultCollector
from lightning_fedstop.module.loss_scale import LossScale
from lightning_fedstop.module.optimizer import LocalSolver
from lightning_fedstop.module.training_pass import BatchPasses, TrainingPass, batch_end_outputs, loss_of


@dataclass(frozen=True)
class LocalSettings:
    """Settings of local training.

    Attributes:
        local_epochs: E, passes over a client's data.
        gradient_clip_val: C, the largest norm of the corrected gradient, or ``None``.
        limit_train_batches: at most this many batches of a client (int), or this share (float), in each local epoch.
        drop_single_sample_batches: leave out batches of one sample.
    """

    local_epochs: int = 1
    gradient_clip_val: float | None = None
    limit_train_batches: int | float | None = None
    drop_single_sample_batches: bool = False


@dataclass
class Job:
    """A client's part in a round.

    Attributes:
        client: who trains.
        make_batches: makes the client's loader, which is iterated once per local epoch.
        seed: of the global random generators while the client trains.
    """

    client: Client
    make_batches: Callable[[], Iterable[Any]]
    seed: int


@dataclass
class ClientResult:
    """All that comes back from a client's local training.

    Attributes:
        client: the client, with the vectors that its method left.
        delta: shape ``(d,)``; Delta_m, the local model minus the model it started from, in the global model's dtype.
        state: buffers and frozen parameters that its training has changed, by name, as they are now.
        steps: K_m, the local steps taken.
        skipped: steps that the loss scale of ``16-mixed`` skipped.
        finite: all numbers of ``delta`` are finite.
        model: shape ``(d,)``; the local model, where a copy of the module trained.
        logged: what was logged there, for :meth:`ResultCollector.merge`.
    """

    client: Client
    delta: Tensor
    state: dict[str, Tensor]
    steps: int
    skipped: int
    finite: bool
    model: Tensor | None = None
    logged: dict[str, Any] = field(default_factory=dict)


class LocalTrainer:
    """Trains one client at a time in one module.

    Args:
        module: the module to train.
        method: the federated method.
        parameters: the module's trainable parameters as a vector.
        solver: the module's optimizer.
        fabric: precision and device.
        transfer: brings a batch to the device.
        collector: takes what the module logs.
        hooks: calls the hooks of callbacks and module.
        settings: epochs, clip and limits.
    """

    def __init__(
        self,
        module: LightningModule,
        method: FederatedMethod,
        parameters: FlatParameters,
        solver: LocalSolver,
        fabric: Fabric,
        transfer: BatchTransfer,
        collector: ResultCollector,
        hooks: Hooks,
        settings: LocalSettings,
    ) -> None:
        self.module = module
        self.method = method
        self.parameters = parameters
        self.solver = solver
        self.fabric = fabric
        self.precision = fabric.strategy.precision
        self.transfer = transfer
        self.collector = collector
        self.hooks = hooks
        self.settings = settings
        self.loss_scale = LossScale(self.precision)
        self.scaler = self.loss_scale.scaler
        self.training_pass = TrainingPass(module, parameters, solver.optimizer, fabric, collector, hooks)
        self._owns_clipping = is_overridden("configure_gradient_clipping", module)
        self._owns_step = is_overridden("optimizer_step", module)
        self._wants_closure = isinstance(solver.optimizer, torch.optim.LBFGS)
        if not any(hooks.owners(hook) for hook in OPTIMIZER_HOOKS):
            solver.flatten(parameters, self.precision)

    def train(self, job: Job, start: ModuleState) -> ClientResult:
        """Train a client from the global model; the module then holds its local model.

        Args:
            job: who trains on what.
            start: buffers and frozen parameters of the round's start.
        """
        client = job.client
        with naming_client(client):
            batches = job.make_batches()
            local_progress.set(LocalProgress(batches, self.settings.limit_train_batches))
            self.load_global(client, start)
            self.hooks("on_client_start", client.index)
            # The hook may have set weights and rates for this client.
            self.parameters.check_unchanged()
            client.lr, client.momentum = self.solver.lr, self.solver.momentum
            with seeded(job.seed):
                return self.run_local_steps(client, batches, start)

    def load_global(self, client: Client, start: ModuleState) -> None:
        """Let the module hold the global model, with a fresh optimizer."""
        start.restore()
        self.solver.start_client()
        self.parameters.vector.copy_(client.theta)

    def run_local_steps(self, client: Client, batches: Iterable[Any], start: ModuleState) -> ClientResult:
        """Run a client's local steps: the paper's client.

        x, the module's parameters, begins at theta. A step moves it against the batch's direction.
        """
        skipped = 0
        self.prepare(client, batches)
        for _ in range(self.settings.local_epochs):
            for batch_idx, batch in self.epoch(batches):
                self.collector.start_batch(batch)
                passes = BatchPasses(self.training_pass, batch, batch_idx)
                self.step(client, passes, partial(self.find_direction, client, passes))
                skipped += passes.overflowed
                self.hooks("on_train_batch_end", batch_end_outputs(passes.outputs), batch, batch_idx)
        self.collector.start_batch(None)
        return self.result(client, start, skipped)

    def find_direction(self, client: Client, passes: BatchPasses) -> Tensor | None:
        """Leave in the gradient vector the direction of a step; gives the loss, ``None`` for a batch to skip."""
        client.motion.see(self.solver.rates)
        step = LocalStep(client, client.motion.steps, self.parameters.vector, self.parameters.grad, passes.backward)
        self.method.gradient(step)
        if passes.outputs is None:
            # An optimizer that a module steps in spite of it finds nothing to do.
            self.parameters.detach_grad()
            return None
        passes.overflowed = self.scaler is not None and not is_finite(step.grad)
        if not passes.overflowed:
            with torch.no_grad():
                self.method.correct(step)
            if self.parameters.leave_out_unused():
                self.solver.unflatten()
        self.hooks("on_before_optimizer_step", self.solver.optimizer)
        self._clip(step.grad)
        with torch.no_grad():
            self.method.after_clip(step)
        return loss_of(passes.outputs)

    def _clip(self, grad: Tensor) -> None:
        """Scale each vector v of the last dimension by min(1, C / (||v|| + 1e-6))."""
        limit = self.settings.gradient_clip_val
        if self._owns_clipping:
            self.module.configure_gradient_clipping(self.solver.optimizer, limit, None)
        elif limit is not None:
            length = norm(grad, keepdim=True) + 1e-6
            # On a CPU no device waits for the host: a gradient that is short enough needs no further operation.
            if length.device.type != "cpu" or length.numel() > 1 or not float(length) <= limit:
                scale = (limit / length).clamp(max=1.0)
                grad.mul_(scale.to(torch.promote_types(grad.dtype, torch.float32)))

    def step(self, client: Client, passes: BatchPasses, find_direction: Callable[[], Tensor | None]) -> None:
        """Let the optimizer move the model, and count the step unless it is skipped."""
        if self._owns_step:
            self._step_of_module(client, passes, find_direction)
            return
        if self._wants_closure:
            self.solver.optimizer.step(find_direction)  # type: ignore[arg-type]
        elif find_direction() is not None:
            if self.scaler:
                # The scaler's own step divides by its scale, and skips the step if something is not finite.
                self.parameters.grad.mul_(self.scaler.get_scale())
            self.solver.step(self.precision)
        if passes.outputs is not None and not passes.overflowed:
            client.motion.add_step()

    def _step_of_module(self, client: Client, passes: BatchPasses, find_direction: Callable[[], Tensor | None]) -> None:
        """Let the module's own ``optimizer_step`` treat a batch, and count the optimizer's steps in it.

        A batch without a step leaves nothing in the method. Weights that were moved by other means were moved in one.
        """
        motion, x = client.motion, self.parameters.vector
        steps, before = motion.steps, x.clone()
        vectors = {name: vector.clone() for name, vector in client.vectors.items()}

        def closure() -> Tensor | None:
            loss = find_direction()
            if loss is not None and self.scaler:
                # The module steps without the scaler, which still has to see the gradient.
                self.parameters.grad.mul_(self.scaler.get_scale())
                self.scaler.unscale_(self.solver.optimizer)
                self.scaler.update()
                if passes.overflowed:
                    self.parameters.detach_grad()
            return loss

        def count(*_: Any) -> None:
            if self.parameters.has_grad:
                motion.see(self.solver.rates)
                motion.add_step()

        hook = self.solver.optimizer.register_step_post_hook(count)
        try:
            self.module.optimizer_step(self.module.current_epoch, passes.batch_idx, self.solver.optimizer, closure)
        finally:
            hook.remove()
        if motion.steps == steps and not torch.equal(x, before):
            motion.add_step()
        if motion.steps == steps:
            client.vectors = vectors

    def prepare(self, client: Client, batches: Iterable[Any]) -> None:
        """Let the method prepare the client's first step."""
        client.motion = self.new_motion()
        if self.method.needs_full_gradient:
            client.vectors["full_gradient"] = self._full_gradient(batches)
        self.method.start(client)

    def new_motion(self) -> Motion:
        """Motion of a client before its first step, at the present rates."""
        return Motion(self.solver.rates, self.solver.runs(self.parameters), self.solver.is_plain_sgd)

    def result(self, client: Client, start: ModuleState, skipped: int = 0) -> ClientResult:
        """Result of a client whose local model the module holds."""
        delta = self.parameters.vector.to(client.theta.dtype) - client.theta
        return ClientResult(client, delta, start.changed(), client.motion.steps, skipped, is_finite(delta))

    def publish(self, result: ClientResult, start: ModuleState) -> None:
        """Load the result of a client that a copy of the module has trained."""
        assert result.model is not None
        start.restore()
        self.parameters.vector.copy_(result.model)
        start.overwrite(result.state)
        self.collector.merge(result.logged)

    def epoch(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Give one local epoch's batches; a hook that returns -1 ends it."""
        progress = local_progress.get()
        for batch_idx, batch in self.device_batches(batches):
            if progress is not None:
                progress.batch_idx = batch_idx
            answers = self.hooks("on_train_batch_start", batch, batch_idx)
            if any(isinstance(answer, int) and answer == -1 for answer in answers):
                return
            yield batch_idx, batch

    def device_batches(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Give the batches on the device with their numbers, without those that are left out."""
        for batch_idx, batch in enumerate(limited(batches, self.settings.limit_train_batches)):
            batch = self.transfer(batch)
            if not (self.settings.drop_single_sample_batches and extract_batch_size(batch) == 1):
                yield batch_idx, batch

    def _full_gradient(self, batches: Iterable[Any]) -> Tensor:
        """Mean gradient over the client's samples at the present parameters; logs and moves nothing."""
        mean = RunningMean(self.parameters.grad)
        for batch_idx, batch in self.device_batches(batches):
            if self._found_gradient(batch, batch_idx):
                mean.add(self.parameters.grad, extract_batch_size(batch))
        return (mean.compute() if mean.weight else mean.total).to(self.parameters.grad.dtype)

    def _found_gradient(self, batch: Any, batch_idx: int) -> bool:
        """Fill the gradient vector outside of a step, at a scale that it is finite at; False for a skipped batch."""
        while self.training_pass(batch, batch_idx, first=False) is not None:
            if self.scaler is None or is_finite(self.parameters.grad) or not self.loss_scale.lower():
                return True
        return False


@dataclass
class LocalProgress:
    """Place of a client in its local training.

    Attributes:
        batches: its loader.
        limit: see :func:`limited`.
        batch_idx: the batch that is trained on, by its number in the local epoch; -1 before the first.
    """

    batches: Iterable[Any]
    limit: int | float | None
    batch_idx: int = -1

    @property
    def is_last_batch(self) -> bool:
        """True for the last batch of an epoch; False where their number is not known."""
        return self.batch_idx + 1 == limited_length(self.batches, self.limit)


local_progress: ContextVar[LocalProgress | None] = ContextVar("local_progress", default=None)
"""The progress of the client that is trained in this thread, ``None`` outside of local training."""


@contextmanager
def naming_client(client: Client) -> Iterator[None]:
    """Name the client in an exception from inside the block; its class and its text stay as they are."""
    try:
        yield
    except Exception as error:
        sentence = f"It was raised in the training of client {client.index} in round {client.round}."
        if sys.version_info >= (3, 11):
            error.add_note(sentence)
        else:
            rank_zero_warn(f"{type(error).__name__}: {error}. {sentence}")
        raise
