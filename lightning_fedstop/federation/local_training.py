"""The one local training loop of the package."""

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_fedstop.core.aggregation import RunningMean
from lightning_fedstop.core.module_state import overwrite, untrained_tensors
from lightning_fedstop.core.parameters import FlatParameters, is_finite, norm
from lightning_fedstop.core.seeding import seeded
from lightning_fedstop.methods.base import Client, FederatedMethod, LocalStep
from lightning_fedstop.methods.momentum import Motion
from lightning_fedstop.module.batches import BatchTransfer, limited, limited_length
from lightning_fedstop.module.hooks import OPTIMIZER_HOOKS, Hooks
from lightning_fedstop.module.logged import ResultCollector
from lightning_fedstop.module.loss_scale import LossScale
from lightning_fedstop.module.optimizer import LocalSolver
from lightning_fedstop.module.statistics import frozen_statistics
from lightning_fedstop.module.training_pass import batch_end_outputs, loss_of

CallHook = Callable[..., list[Any]]
"""Calls a hook of all callbacks and of the module, and gives what they return."""


@dataclass
class LocalProgress:
    """The place of a client in its local training.

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
        """Whether the batch is the last of its epoch; False where their number is not known."""
        return self.batch_idx + 1 == limited_length(self.batches, self.limit)


local_progress: ContextVar[LocalProgress | None] = ContextVar("local_progress", default=None)
"""The progress of the client that is trained in this thread, ``None`` outside of local training."""


@dataclass
class LocalUpdate:
    """What a client sends back.

    Attributes:
        delta: shape ``(d,)``; Delta_m, the last local model minus the global model, in the global model's dtype.
        steps: K_m, the local steps taken.
    """

    delta: Tensor
    steps: int


@dataclass
class ClientResult:
    """A client at the end of its local steps, where several train at once.

    Attributes:
        steps: the local steps it took.
        x: shape ``(d,)``; its local model.
        state: buffers and frozen parameters that its training may have changed, by name.
        vectors: what the method left in ``client.vectors``.
        logged: what was logged, for :meth:`ResultCollector.merge`.
    """

    steps: int
    x: Tensor
    state: dict[str, Tensor]
    vectors: dict[str, Tensor]
    logged: dict[str, Any] = field(default_factory=dict)


@dataclass
class Job:
    """A client's part in a round.

    Attributes:
        client: who trains.
        make_batches: makes the client's loader anew; it is iterated once per local epoch.
        seed: of the global random generators while the client trains.
    """

    client: Client
    make_batches: Callable[[], Iterable[Any]]
    seed: int


@contextmanager
def naming_client(client: Client) -> Iterator[None]:
    """Add to an exception inside the block whose training raised it; its class and its text stay as they are."""
    try:
        yield
    except Exception as error:
        sentence = f"It was raised in the training of client {client.index} in round {client.round}."
        if sys.version_info >= (3, 11):
            error.add_note(sentence)
        else:
            rank_zero_warn(f"{type(error).__name__}: {error}. {sentence}")
        raise


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


class LocalTrainer:
    """Trains one client after the other in the one module of this process.

    A step: the gradient, the method's correction, the clip, then the optimizer with its weight decay and momentum.

    Args:
        module: the module to train; it holds the global model when :meth:`run` is called.
        method: the federated method.
        parameters: the module's trainable parameters as a vector.
        solver: the module's optimizer.
        fabric: precision and device.
        transfer: brings a batch to the device.
        collector: takes what the module logs.
        call_hook: calls the batch hooks of callbacks and module.
        settings: epochs, clip and limits.

    Attributes:
        finished: when each of those that train at once had no client left, by ``time.perf_counter``.
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
        call_hook: CallHook,
        settings: LocalSettings,
    ) -> None:
        self.module = module
        self.method = method
        self.parameters = parameters
        self.solver = solver
        self.fabric = fabric
        self.precision = fabric.strategy.precision
        self.autocast = fabric.autocast
        self.transfer = transfer
        self.collector = collector
        self.call_hook = call_hook
        self.settings = settings
        self.finished: list[float] = []
        self.loss_scale = LossScale(self.precision)
        self.scaler = self.loss_scale.scaler
        self._overflowed = False
        self._has_warned = False
        self._takes_batch_idx = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._owns_backward = is_overridden("backward", module)
        self._owns_clipping = is_overridden("configure_gradient_clipping", module)
        self._owns_step = is_overridden("optimizer_step", module)
        self._owns_zero_grad = is_overridden("optimizer_zero_grad", module)
        self._wants_closure = "closure" in inspect.signature(self.solver.optimizer.step).parameters and isinstance(
            self.solver.optimizer, torch.optim.LBFGS
        )
        if isinstance(call_hook, Hooks) and not any(call_hook.owners(hook) for hook in OPTIMIZER_HOOKS):
            self.solver.flatten(parameters, self.precision)

    def run(self, jobs: Sequence[Job], load_global: Callable[[], None]) -> Iterator[tuple[Client, LocalUpdate]]:
        """Train the clients of a round on this process.

        Args:
            jobs: who trains on what.
            load_global: puts the global model and its buffers into the module.

        Yields:
            Each client with its update, in the order of ``jobs``; the module then holds the client's local model.
        """
        for job in jobs:
            yield job.client, self._train(job, self._start(job, load_global))
            # The jobs outlive their clients' training, and the vectors of a whole cohort would be too many.
            job.client.vectors = {}
        self.finished = [time.perf_counter()]

    def _start(self, job: Job, load_global: Callable[[], None]) -> Iterable[Any]:
        with naming_client(job.client):
            batches = job.make_batches()
            local_progress.set(LocalProgress(batches, self.settings.limit_train_batches))
            load_global()
            self.start_client(job.client)
            self.call_hook("on_client_start", job.client.index)
            self._take_from_hook(job.client)
        return batches

    def _take_from_hook(self, client: Client) -> None:
        """Let the method know the rates that hold for this client; the module holds the weights it starts at."""
        self.parameters.check_unchanged()
        client.lr, client.momentum = self.solver.lr, self.solver.momentum

    def _train(self, job: Job, batches: Iterable[Any]) -> LocalUpdate:
        with naming_client(job.client), seeded(job.seed):
            return self.train_client(job.client, batches)

    def train_client(self, client: Client, batches: Iterable[Any]) -> LocalUpdate:
        """One client's local steps; ``steps`` is 0 if there was no batch."""
        return self.update_of(client, self.take_steps(client, batches))

    def take_steps(self, client: Client, batches: Iterable[Any]) -> int:
        """Take a started client's local steps, after which the module holds its local model; gives their number."""
        local_progress.set(LocalProgress(batches, self.settings.limit_train_batches))
        self._prepare(client, batches)
        steps = self._step_through(client, batches)
        self.collector.start_batch(None)
        return steps

    def start_client(self, client: Client) -> None:
        """Let the module hold theta, with a fresh optimizer."""
        self.solver.start_client()
        self.parameters.vector.copy_(client.theta)

    def load_result(self, client: Client, result: ClientResult, load_global: Callable[[], None]) -> int:
        """Put the result of a client that was trained beside others where :meth:`run` leaves one; gives its steps."""
        load_global()
        client.vectors = result.vectors
        self.parameters.vector.copy_(result.x)
        held = {name: tensor for name, *_, tensor in untrained_tensors(self.module, self.parameters.parameters)}
        for name, value in result.state.items():
            overwrite(held[name], value)
        self.collector.merge(result.logged)
        return result.steps

    def update_of(self, client: Client, steps: int) -> LocalUpdate:
        """What a client sends back whose local model the module holds."""
        return LocalUpdate(self.parameters.vector.to(client.theta.dtype) - client.theta, steps)

    def new_motion(self) -> Motion:
        """The motion of a client before its first step, at the rates of now."""
        solver = self.solver
        return Motion(solver.rates, solver.runs(self.parameters), solver.is_plain_sgd)

    def _prepare(self, client: Client, batches: Iterable[Any]) -> None:
        """What the method needs before the client's first step."""
        client.motion = self.new_motion()
        if self.method.needs_full_gradient:
            client.vectors["full_gradient"] = self._full_gradient(batches)
        self.method.start(client)

    def _step_through(self, client: Client, batches: Iterable[Any]) -> int:
        for batch_idx, batch in self._epochs(batches):
            self.collector.start_batch(batch)
            outputs = self.step(client, batch, batch_idx)
            self.loss_scale.skipped += bool(outputs) and self._overflowed
            self.call_hook("on_train_batch_end", outputs, batch, batch_idx)
        return client.motion.steps

    def _epochs(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """A client's batches on the device, all local epochs of them, each with its number in its epoch."""
        progress = local_progress.get()
        for _ in range(self.settings.local_epochs):
            for batch_idx, batch in self.epoch(batches):
                if progress is not None:
                    progress.batch_idx = batch_idx
                answers = self.call_hook("on_train_batch_start", batch, batch_idx)
                if any(isinstance(answer, int) and answer == -1 for answer in answers):
                    break
                yield batch_idx, batch

    def epoch(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """One local epoch's batches on the device, without those that are left out."""
        for batch_idx, batch in enumerate(limited(batches, self.settings.limit_train_batches)):
            batch = self.transfer(batch)
            if not (self.settings.drop_single_sample_batches and extract_batch_size(batch) == 1):
                yield batch_idx, batch

    def _full_gradient(self, batches: Iterable[Any]) -> Tensor:
        """The mean gradient over the client's samples at the module's present parameters; logs and moves nothing."""
        mean = RunningMean(self.parameters.grad)
        for batch_idx, batch in self.epoch(batches):
            if self._found_gradient(batch, batch_idx):
                mean.add(self.parameters.grad, extract_batch_size(batch))
        return (mean.compute() if mean.weight else mean.total).to(self.parameters.grad.dtype)

    def _found_gradient(self, batch: Any, batch_idx: int) -> bool:
        """Fill the gradient vector outside of a step, at a scale that it is finite at; False for a skipped batch."""
        while self._backward(batch, batch_idx, first=False) is not None:
            if self.scaler is None or is_finite(self.parameters.grad) or not self.loss_scale.lower():
                return True
        return False

    def step(self, client: Client, batch: Any, batch_idx: int) -> dict[str, Any]:
        """One local step; gives what a ``Trainer`` tells callbacks: ``loss`` and what else ``training_step`` returned.

        The dict is empty if ``training_step`` skipped the batch. A step that is taken counts in ``client.motion``.
        """
        optimizer = self.solver.optimizer
        outputs: list[Any] = []

        def backward(first: bool) -> None:
            outputs.append(self._backward(batch, batch_idx, first))

        def closure() -> Tensor | None:
            outputs.clear()
            client.motion.see(self.solver.rates)
            step = LocalStep(client, client.motion.steps, self.parameters.vector, self.parameters.grad, backward)
            if not self._find_direction(step, outputs):
                # An optimizer that steps all the same, from a module's own `optimizer_step`, finds nothing to do.
                self.parameters.detach_grad()
                return None
            if self._owns_step and self.scaler:
                # The module steps without the scaler, which still has to see the gradient.
                self.parameters.grad.mul_(self.scaler.get_scale())
                self.scaler.unscale_(optimizer)
                self.scaler.update()
                if self._overflowed:
                    self.parameters.detach_grad()
            return loss_of(outputs[0])

        if self._owns_step:
            self._step_of_module(client, batch_idx, closure)
        elif self._wants_closure:
            optimizer.step(closure)  # type: ignore[arg-type]
            self._count(client, outputs)
        elif closure() is not None:
            if self.scaler:
                # The scaler's own step divides by its scale, and skips the step if something is not finite.
                self.parameters.grad.mul_(self.scaler.get_scale())
            self.solver.step(self.precision)
            self._count(client, outputs)
        return batch_end_outputs(outputs[0]) if outputs else {}

    def _count(self, client: Client, outputs: Sequence[Any]) -> None:
        if outputs[0] is not None and not self._overflowed:
            client.motion.add_step()

    def _step_of_module(self, client: Client, batch_idx: int, closure: Callable[[], Tensor | None]) -> None:
        """Let the module's own ``optimizer_step`` do what it does with a batch, and count the optimizer's steps in it.

        A batch without a step leaves nothing in the method. Weights that were moved by other means were moved in one.
        """
        motion, x = client.motion, self.parameters.vector
        steps, before = motion.steps, x.clone()
        vectors = {name: vector.clone() for name, vector in client.vectors.items()}

        def count(*_: Any) -> None:
            if self.parameters.has_grad:
                motion.see(self.solver.rates)
                motion.add_step()

        hook = self.solver.optimizer.register_step_post_hook(count)
        try:
            self.module.optimizer_step(self.module.current_epoch, batch_idx, self.solver.optimizer, closure)
        finally:
            hook.remove()
        if motion.steps == steps and not torch.equal(x, before):
            motion.add_step()
        if motion.steps == steps:
            client.vectors = vectors

    def _find_direction(self, step: LocalStep, outputs: Sequence[Any]) -> bool:
        """Leave in ``step.grad`` what the optimizer takes: the gradient, corrected and clipped.

        Returns:
            False if ``training_step`` skipped the batch: its ``outputs``, which the first pass adds, are ``None``.
        """
        self.method.gradient(step)
        if outputs[0] is None:
            return False
        # The scaler skips such a step and lowers its scale: it is none for the method.
        self._overflowed = self.scaler is not None and not is_finite(step.grad)
        if not self._overflowed:
            with torch.no_grad():
                self.method.correct(step)
        self.call_hook("on_before_optimizer_step", self.solver.optimizer)
        self._clip(step.grad)
        with torch.no_grad():
            self.method.after_clip(step)
        return True

    def _backward(self, batch: Any, batch_idx: int, first: bool) -> Any:
        """Fill the gradient vector at the module's present parameters; gives what ``training_step`` returned.

        Only the first pass of a step counts for running statistics, metrics and what is logged.
        """
        if first:
            return self._pass(batch, batch_idx)
        with frozen_statistics(self.module, self.parameters.parameters), self.collector.muted():
            return self._pass(batch, batch_idx)

    def _pass(self, batch: Any, batch_idx: int) -> Any:
        with torch.enable_grad(), self.autocast():
            outputs = self.module.training_step(*self._arguments(batch, batch_idx))
        self.call_hook("on_before_zero_grad", self.solver.optimizer)
        self.call_hook("optimizer_zero_grad", self.module.current_epoch, batch_idx, self.solver.optimizer)
        if self._owns_zero_grad and self.parameters.has_grad and self.parameters.grad.any():
            raise MisconfigurationException(
                f"{type(self.module).__name__}.optimizer_zero_grad leaves gradients for the next batch to add to, but a"
                " local step takes the gradient of one batch: use a larger batch size."
            )
        self.parameters.zero_grad()
        loss = loss_of(outputs)
        if loss is None:
            self._warn_of_none()
            return None
        self.call_hook("on_before_backward", loss)
        if self._owns_backward:
            self.module.backward(self.scaler.scale(loss) if self.scaler else loss)
        else:
            self.precision.backward(loss, self.module)
        self.call_hook("on_after_backward")
        self.parameters.gather_grad()
        if self.scaler:
            self.parameters.grad.div_(self.scaler.get_scale())
        return outputs

    def _arguments(self, batch: Any, batch_idx: int) -> tuple[Any, ...]:
        """What ``training_step`` takes of the two."""
        return (batch, batch_idx) if self._takes_batch_idx else (batch,)

    def _warn_of_none(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn("`training_step` returned None, which skips the batch; that is fine if it is on purpose.")

    def _clip(self, grad: Tensor) -> None:
        """V * min(1, C / (||v|| + 1e-6)), over the whole trainable vector, the last dimension."""
        limit = self.settings.gradient_clip_val
        if self._owns_clipping:
            self.module.configure_gradient_clipping(self.solver.optimizer, limit, None)
        elif limit is not None:
            length = norm(grad, keepdim=True) + 1e-6
            # On a CPU no device waits for the host: a gradient that is short enough needs no further operation.
            if length.device.type != "cpu" or length.numel() > 1 or not float(length) <= limit:
                scale = (limit / length).clamp(max=1.0)
                grad.mul_(scale.to(torch.promote_types(grad.dtype, torch.float32)))
