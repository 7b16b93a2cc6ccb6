"""The callback that stops a fit when the weights cease to leave their start."""

import math
import os
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_fedstop.stopping.average import SaturationAverage
from lightning_fedstop.stopping.callbacks.base import CriterionCallback, is_dry_run, is_federated
from lightning_fedstop.stopping.callbacks.federated_trainer import FederatedTrainer
from lightning_fedstop.stopping.callbacks.sharding import refuse_sharding, refuse_shards
from lightning_fedstop.stopping.criteria.task_vector import Decision, StoppingReason, TaskVectorCriterion, Variant
from lightning_fedstop.utilities.validate import flag, one_of


class TaskVectorEarlyStopping(CriterionCallback):
    """Stop a fit when the weights hardly move away from their start, without validation data.

    After every training epoch, or every so many steps, it takes the distance of the trainable parameters from where
    the fit began and its growth since the check before. Once ``patience`` checks in a row have grown by less than the
    fraction ``threshold``, the fit is stopped (Lee et al., "Data-free early stopping for federated learning", equations
    (5) to (11); :class:`TaskVectorCriterion` gives the rule). It reads parameters only: no metric, no validation loop,
    no buffers. In a ``FederatedLoop`` an epoch is a round, and the distance is that of the server's global model,
    which the loop measures and records in every round; a round in which no client trained is no check.

    It logs ``task_vector/distance``, ``task_vector/growth_rate`` (NaN at the first check) and
    ``task_vector/wait_count``; a second such callback in the same Trainer logs under ``task_vector_2/``, and so on. It
    does nothing under ``fast_dev_run``.

    - The fit begins with its first batch: weights that hooks have set until then are the start, not a movement.
    - An epoch in which no optimizer has stepped, such as one of a stream that is used up, is no check.
    - A ``Trainer``'s ``min_epochs`` and ``min_steps`` are kept, and the rule must be met then, not just before.
    - Its state, the starting weights included, is part of every checkpoint. Resumed with ``ckpt_path``, it counts on
      as if the run had not been interrupted, even where the checkpoint was written before the epoch was checked (at
      the end of validation, say). A run that was already stopped trains nothing more. Every other ``fit`` starts clean.
    - Resumed with other arguments, it measures from the same start, if the checkpoint holds it, and counts from then
      on; ``fedstop replay`` tells where it would have stopped before.
    - Parameters that are unfrozen in the course of a fit are watched from then on, those frozen again remain so: the
      distance is that of all parameters ever trainable in this fit.
    - Strategies that shard parameters (FSDP, model parallel, DeepSpeed's stage 3) are refused.
    - Under ``strategy="ddp_spawn"`` the processes' callbacks are lost with them, as for Lightning's own
      ``EarlyStopping``: read ``trainer.current_epoch`` or the log.
    - It also runs in a ``pytorch_lightning.Trainer``.

    Args:
        threshold: tau: growth per check under this fraction counts as standing still. Above 0.
        patience: rho: checks in a row that must stand still. At least 1; the earliest stop is at check
            ``patience + 1``.
        min_rounds: No stop before this check. One that was due earlier is not kept: the rule must be met again.
        check_finite: Stop at once when a parameter is NaN or infinite.
        check_every_n_epochs: Training epochs, or rounds, from one check to the next. 1 by default.
        verbose: Print a line at every check, not only at the stop.
        log_rank_zero_only: Print on the first process only.
        variant: ``"paper"``, or ``"released_code"`` to decide as the authors' code does.
        start_weights_on_cpu: Hold the one copy of the starting weights in main memory instead of on the device; in a
            ``FederatedLoop``, the server's.
        observe_only: Record when the run would be stopped, and let it go on.
        average: ``"saturation"`` to keep the mean of the models of the checks that stood still, restarted when one does
            not, and to offer it at the stop beside the last model: in ``saturation_average``, in the file
            ``average_path``, and in a ``FederatedLoop`` also tested. It takes two more copies of the weights.
        check_every_n_steps: Optimizer steps from one check to the next, in place of ``check_every_n_epochs``: for
            endless streams and long epochs. Batches whose gradients are accumulated take no step. Not in a
            ``FederatedLoop``.

    Attributes:
        wait_count: Checks in a row that stood still.
        stopped_epoch: The epoch, counted from 0, the fit was stopped in; 0 as well if it was not. ``stopped`` tells.
        stop_round: The check, counted from 1, it was stopped at, or None.
        stopping_reason: A :class:`StoppingReason`.
        stopping_reason_message: The same in a sentence, or None.
        saturation_average: A :class:`SaturationAverage`, or None without ``average``.
        average_path: The checkpoint of weights that holds it, once the fit is stopped, or None.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If an argument is out of its range.
        MisconfigurationException: When a fit starts with sharded parameters, or with none that is trainable.

    >>> early_stopping = TaskVectorEarlyStopping(threshold=0.01, patience=10)
    >>> trainer = pl.Trainer(max_epochs=500, callbacks=[early_stopping], accelerator="cpu", logger=False)
    >>> early_stopping.stopped, early_stopping.stopping_reason
    (False, <StoppingReason.NOT_STOPPED: 'not_stopped'>)
    """

    log_prefix = "task_vector"
    criterion: TaskVectorCriterion

    def __init__(
        self,
        threshold: float = 0.01,
        patience: int = 10,
        min_rounds: int = 0,
        check_finite: bool = True,
        check_every_n_epochs: int | None = None,
        verbose: bool = False,
        log_rank_zero_only: bool = False,
        variant: Variant = "paper",
        start_weights_on_cpu: bool = False,
        observe_only: bool = False,
        average: Literal["saturation"] | None = None,
        check_every_n_steps: int | None = None,
    ) -> None:
        if average is not None:
            one_of("average", average, ("saturation",))
        self.saturation_average = None if average is None else SaturationAverage()
        device = "cpu" if flag("start_weights_on_cpu", start_weights_on_cpu) else None
        criterion = TaskVectorCriterion(threshold, patience, min_rounds, check_finite, variant, device)
        super().__init__(
            criterion, check_every_n_epochs, verbose, log_rank_zero_only, observe_only, check_every_n_steps
        )

    @property
    def threshold(self) -> float:
        """Tau."""
        return self.criterion.threshold

    @property
    def patience(self) -> int:
        """Rho."""
        return self.criterion.patience

    @property
    def min_rounds(self) -> int:
        """The first check that may stop the fit."""
        return self.criterion.min_rounds

    @property
    def check_finite(self) -> bool:
        """True if divergence stops the fit at once."""
        return self.criterion.check_finite

    @property
    def variant(self) -> Variant:
        """Variant of the rule."""
        return self.criterion.variant

    @property
    def start_weights_on_cpu(self) -> bool:
        """True if the copy of the starting weights lies in main memory."""
        return self.criterion.start_device == "cpu"

    @property
    def average(self) -> Literal["saturation"] | None:
        """The mean that is kept beside the last model."""
        return None if self.saturation_average is None else "saturation"

    def _reset(self) -> None:
        super()._reset()
        self._names: list[str] = []  # of the parameters watched
        self._awaits_start = False
        self.average_path: str | None = None
        if self.saturation_average is not None:
            self.saturation_average.reset()
        self._told_of: set[str] = set()  # what the average leaves out
        self._has_warned = False

    @property
    def state_key(self) -> str:
        """Name of the state: the arguments that a decision depends on."""
        return self._generate_state_key(
            threshold=self.criterion.threshold,
            patience=self.criterion.patience,
            min_rounds=self.criterion.min_rounds,
            check_finite=self.criterion.check_finite,
            check_every_n_epochs=self.check_every_n_epochs,
            variant=self.criterion.variant,
            observe_only=self.observe_only,
            **{} if self.check_every_n_steps is None else {"check_every_n_steps": self.check_every_n_steps},
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start clean for a fit, and refuse sharding strategies."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            refuse_sharding(trainer)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the start from the state of such a rule with other arguments."""
        states = checkpoint.get("callbacks") or {}
        if self._keeps_its_state or is_federated(trainer) or self.state_key in states:
            return
        for state in states.values():
            if isinstance(state, Mapping) and "parameter_names" in state and state["criterion"]["start"] is not None:
                self._names = list(state["parameter_names"])
                self.criterion.start(state["criterion"]["start"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count on from the checkpoint, or wait for the first batch."""
        super().on_train_start(trainer, pl_module)
        if is_dry_run(trainer):
            return
        refuse_shards(pl_module)
        is_measured = isinstance(trainer, FederatedTrainer)
        has_start = is_measured or self.criterion.theta_0 is not None
        if has_start and not is_measured:
            self._watched(pl_module)
        if self._is_resumed and has_start:
            self._catch_up(trainer, pl_module)
            self._stay_stopped(trainer)
            return
        if trainer.ckpt_path is not None and not has_start and not self._is_resumed:
            rank_zero_warn(
                f"{trainer.ckpt_path} holds no weights that the run began with: distances are measured from those it "
                "holds."
            )
        if not any(parameter.requires_grad for parameter in pl_module.parameters()):
            raise MisconfigurationException(
                f"`TaskVectorEarlyStopping` needs a trainable parameter, and {type(pl_module).__name__} has none."
            )
        self._awaits_start = not has_start
        self._last_epoch, self._last_step = trainer.current_epoch - 1, trainer.global_step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Take the starting weights, or watch parameters that were unfrozen since."""
        if self._awaits_start:
            # Hooks that come before, the module's own `on_train_start` among them, still set what training begins with.
            self._awaits_start = False
            self._names = [name for name, parameter in pl_module.named_parameters() if parameter.requires_grad]
            self.criterion.start(self._watched(pl_module))
        elif batch_idx == 0 and self._names:
            self._watch_unfrozen(pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check, if a check is due at this step."""
        if not is_dry_run(trainer) and self._is_due_at_step(trainer.global_step):
            self._check_and_log(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check, if a check is due after this epoch."""
        if is_dry_run(trainer) or not self._is_due(trainer.current_epoch):
            return
        if self._has_stepped(trainer, pl_module) and not self._awaits_start:
            self._check_and_log(trainer, pl_module)

    def _check_and_log(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._names and (unfrozen := self._watch_unfrozen(pl_module)):
            rank_zero_warn(
                f"{', '.join(unfrozen)} became trainable in the middle of epoch {trainer.current_epoch}; what it had "
                "moved before this check is not part of the distance. Unfreeze at the start of an epoch instead."
            )
        with self._timed():
            decision = self._check(trainer, pl_module, trainer.current_epoch)
        growth = math.nan if decision.growth_rate is None else decision.growth_rate
        self._log(pl_module, {"distance": decision.distance, "growth_rate": growth, "wait_count": decision.count})

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule, epoch: int) -> Decision:
        if isinstance(trainer, FederatedTrainer):
            assert trainer.task_vector_distance is not None
            decision = self.criterion.update_distance(trainer.task_vector_distance)
        else:
            decision = self.criterion.update(self._watched(pl_module))
        was_stopped = self.stopped
        if self.saturation_average is not None and not was_stopped:
            self.saturation_average.update(pl_module, decision.count)
            self._tell_of_left_out(trainer, self.saturation_average)
        self._act(trainer, epoch, decision, self._explain(decision))
        if self.saturation_average is not None and self.saturation_average.rounds and self.stopped and not was_stopped:
            self.average_path = _save_average(self.saturation_average, trainer, pl_module, self.log_name)
        if not math.isfinite(decision.distance) and not self.stopped and not self._has_warned:
            self._has_warned = True
            place = self._place(trainer, epoch)
            rank_zero_warn(f"A parameter is NaN or infinite since {place}, and the fit is not stopped for it.")
        return decision

    def _tell_of_left_out(self, trainer: pl.Trainer, average: SaturationAverage) -> None:
        new = {name: reason for name, reason in average.left_out.items() if name not in self._told_of}
        if new:
            self._told_of.update(new)
            which = ", ".join(f"{name} ({reason})" for name, reason in new.items())
            self._print(trainer, f"The saturation average leaves out what cannot be averaged: {which}.")

    def _catch_up(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the checkpoint's last epoch, if it was saved before its check."""
        finished = trainer.current_epoch
        if self.check_every_n_epochs is None:
            if self._is_due_at_step(trainer.global_step):
                self._check(trainer, pl_module, finished)
            return
        due = finished // self.check_every_n_epochs * self.check_every_n_epochs - 1
        if due == finished - 1 and self._is_due(due) and self._has_stepped(trainer, pl_module):
            self._check(trainer, pl_module, due)
        elif due > self._last_epoch and not isinstance(trainer, FederatedTrainer):
            rank_zero_warn(f"The state of {self.state_key} in {trainer.ckpt_path} lacks the check of epoch {due}.")

    def _watched(self, pl_module: pl.LightningModule) -> list[nn.Parameter]:
        parameters = dict(pl_module.named_parameters())
        if missing := [name for name in self._names if name not in parameters]:
            raise MisconfigurationException(
                f"`TaskVectorEarlyStopping` measures {', '.join(missing)} from the start of the fit, but "
                f"{type(pl_module).__name__} has no such parameter now; parameters must keep their names during a fit."
            )
        return [parameters[name] for name in self._names]

    def _watch_unfrozen(self, pl_module: pl.LightningModule) -> list[str]:
        watched = set(self._names)
        unfrozen = {name: p for name, p in pl_module.named_parameters() if p.requires_grad and name not in watched}
        if unfrozen:
            # They stood still until now, so what they hold is where they began.
            self.criterion.extend(unfrozen.values())
            self._names += unfrozen
        return list(unfrozen)

    def _explain(self, decision: Decision) -> str:
        if decision.reason is StoppingReason.DIVERGED:
            return "A parameter is NaN or infinite."
        if decision.reason is StoppingReason.NOT_MOVING:
            span = f"{decision.round} {self._interval}{'s' * (decision.round != 1)}"
            return f"No parameter has moved in {span}; is the learning rate 0, or a gradient missing?"
        if decision.reason is StoppingReason.SATURATED:
            bound = self._in_a_row(self.criterion.threshold, decision.count)
            return f"The distance from the start ({decision.distance:.4g}) has grown by less than {bound}."
        growth = "" if decision.growth_rate is None else f", growth rate {decision.growth_rate:.4g}"
        count = f"saturated {decision.count} of {self.criterion.patience}"
        return f"distance {decision.distance:.4g}{growth}, {count}."

    def state_dict(self) -> dict[str, Any]:
        """The count, the starting weights and the record of the stop."""
        average = self.saturation_average
        return {
            **super().state_dict(),
            "parameter_names": list(self._names),
            "average": None if average is None else average.state_dict(),
            "average_path": self.average_path,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from a state, in ``fit`` that of its ``ckpt_path`` alone."""
        super().load_state_dict(state_dict)
        if not self._keeps_its_state:
            self._names = list(state_dict["parameter_names"])
            self.average_path = state_dict.get("average_path")
            if self.saturation_average is not None and state_dict.get("average"):
                self.saturation_average.load_state_dict(state_dict["average"])


def _save_average(
    average: SaturationAverage, trainer: pl.Trainer, pl_module: pl.LightningModule, name: str
) -> str | None:
    """Write the mean beside the other checkpoints, where the Trainer writes any."""
    if not trainer.checkpoint_callbacks:
        return None
    path = os.path.join(trainer.log_dir or trainer.default_root_dir, "checkpoints", f"{name}_average.ckpt")
    with average.held_by(pl_module):
        trainer.save_checkpoint(path, weights_only=True)
    return path
