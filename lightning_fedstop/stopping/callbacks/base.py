"""The base of callbacks that stop a fit by a criterion."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_prefixed_message, rank_zero_warn

from lightning_fedstop.stopping.callbacks.federated_trainer import has_trained
from lightning_fedstop.stopping.criteria.decision import Criterion, StopDecision, StoppingReason
from lightning_fedstop.utilities.validate import flag, whole_number

# Below Lightning's own logger, whose handler and level it shares: the line on a stop is seen as the Trainer's own are.
log = logging.getLogger("lightning.pytorch.fedstop")


class CriterionCallback(pl.Callback):
    """Base of callbacks that ask a criterion during a fit and stop it.

    A subclass hands its criterion what it looks at, logs with :meth:`_log`, and passes the decision to :meth:`_act`.
    The record of a stop, one decision for all ranks, and the state in checkpoints are settled here. Resumed with the
    same arguments, a rule counts on; one with other arguments, or a new one, counts from the resume on and says so.

    Args:
        criterion: The criterion.
        check_every_n_epochs: Training epochs from one check to the next; 1 where ``check_every_n_steps`` is None.
        verbose: Print a line at every check, not only at the stop.
        log_rank_zero_only: Print on the first process only.
        observe_only: Record when the run would be stopped, and let it go on.
        check_every_n_steps: Optimizer steps of a ``Trainer`` from one check to the next, in place of epochs.

    Attributes:
        wait_count: The criterion's count after the last check.
        stopped_epoch: The epoch, counted from 0, that the fit was stopped in. It is 0 as well while nothing has
            stopped, as in Lightning's ``EarlyStopping``: ask ``stopped`` or ``stop_round`` which it is.
        stop_round: The check, counted from 1, that the fit was stopped at, or None.
        stopping_reason: Why.
        stopping_reason_message: The same in a sentence, or None.
        seconds: Time this callback has taken in this fit.
        log_name: What the names of its logged figures begin with, before a slash.
    """

    log_prefix = "criterion"
    criterion: Criterion

    def __init__(
        self,
        criterion: Criterion,
        check_every_n_epochs: int | None = None,
        verbose: bool = False,
        log_rank_zero_only: bool = False,
        observe_only: bool = False,
        check_every_n_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.criterion = criterion
        if check_every_n_steps is None:
            check_every_n_epochs = 1 if check_every_n_epochs is None else check_every_n_epochs
            whole_number("check_every_n_epochs", check_every_n_epochs, least=1)
        elif check_every_n_epochs is None:
            whole_number("check_every_n_steps", check_every_n_steps, least=1)
        else:
            raise ValueError(
                "Only one of `check_every_n_epochs` and `check_every_n_steps` can be given, got "
                f"{check_every_n_epochs!r} and {check_every_n_steps!r}."
            )
        self.check_every_n_epochs = check_every_n_epochs
        self.check_every_n_steps = check_every_n_steps
        self.verbose = flag("verbose", verbose)
        self.log_rank_zero_only = flag("log_rank_zero_only", log_rank_zero_only)
        self.observe_only = flag("observe_only", observe_only)
        self._fresh_criterion = criterion.state_dict()
        self.log_name = self.log_prefix
        self._keeps_its_state = False
        self._unit = "epoch"
        self._reset()

    def _reset(self) -> None:
        self.criterion.load_state_dict(self._fresh_criterion)
        self.wait_count = 0
        self.stopped_epoch = 0
        self.stop_round: int | None = None
        self.stopping_reason = StoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._is_resumed = False
        self.seconds = 0.0
        self._last_epoch = -1  # the last one checked
        self._last_step = 0  # the Trainer's `global_step` at the last check
        self._has_said_no_step = False

    def _place(self, trainer: pl.Trainer, epoch: int) -> str:
        """Name an epoch, counted from 0, or a round, counted from 1."""
        if self._unit == "round":
            return f"round {epoch + 1}"
        return f"epoch {epoch}" if self.check_every_n_steps is None else f"epoch {epoch} at step {trainer.global_step}"

    @property
    def _interval(self) -> str:
        """Name of the unit between two checks."""
        return self._unit if self.check_every_n_epochs == 1 else "check"

    def _in_a_row(self, threshold: float, count: int) -> str:
        """Put a bound in words, as in "1 % a round, 5 rounds in a row"."""
        name = self._interval
        article = "an" if name == "epoch" else "a"
        return f"{100 * threshold:g} % {article} {name}, {count} {name}{'s' * (count != 1)} in a row"

    @property
    def stopped(self) -> bool:
        """True if the criterion has stopped the fit (or would have, with ``observe_only``)."""
        return self.stop_round is not None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start clean for a fit; a checkpoint's state is loaded after this."""
        # `test(ckpt_path="best")` loads the callbacks' states too: it must not overwrite what the fit has recorded.
        self._keeps_its_state = stage != "fit"
        if stage == "fit":
            self._reset()
            self._unit = "round" if is_federated(trainer) else "epoch"
            if self.check_every_n_steps is not None and is_federated(trainer):
                raise MisconfigurationException(
                    f"`{type(self).__name__}(check_every_n_steps={self.check_every_n_steps})` counts the steps of a "
                    "Trainer; in a FederatedLoop a round is the unit: use `check_every_n_epochs`, which counts rounds."
                )
            alike = [callback for callback in getattr(trainer, "callbacks", []) if type(callback) is type(self)]
            place = alike.index(self) + 1 if self in alike else 1
            self.log_name = self.log_prefix if place == 1 else f"{self.log_prefix}_{place}"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn once a fit of conditions that make a rule fire early or never."""
        callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
        first = next((callback for callback in callbacks if isinstance(callback, CriterionCallback)), None)
        if is_dry_run(trainer) or not trainer.is_global_zero:
            return
        if trainer.ckpt_path is not None and not self._is_resumed:
            self._print(
                trainer,
                f"{type(self).__name__} counts from here on, since {trainer.ckpt_path} holds no count with its "
                "arguments; `fedstop replay` tells where it would have stopped before.",
            )
        if first is self and (schedules := [type(c.scheduler).__name__ for c in trainer.lr_scheduler_configs]):
            self._print(
                trainer,
                f"The learning rate follows {', '.join(schedules)}: where it falls, weights move less and figures "
                "level off, so a stopping rule may be met by the schedule and not by the training.",
            )
        if is_federated(trainer) or trainer.num_training_batches != float("inf"):
            return
        if self.check_every_n_epochs and trainer.max_epochs == -1:
            self._print(
                trainer,
                f"{type(self).__name__} checks at the end of an epoch, and this one has no end that is known: for an "
                "endless stream, give `check_every_n_steps` where the rule has it.",
            )
        elif self.check_every_n_steps and trainer.min_epochs:
            rank_zero_warn(
                f"A Trainer stops no epoch before `min_epochs={trainer.min_epochs}` are over, and this one has no end "
                "that is known; `min_steps` sets `min_epochs=1` unless it is given: pass `min_epochs=0`."
            )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let states be loaded by hand again."""
        self._keeps_its_state = False

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Do as ``teardown``, which Lightning leaves out then."""
        self._keeps_its_state = False

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    def _is_due(self, epoch: int) -> bool:
        # An epoch is checked once: resumed at an epoch's end, a Trainer limited by steps runs its end a second time.
        period = self.check_every_n_epochs
        return period is not None and (epoch + 1) % period == 0 and epoch > self._last_epoch

    def _is_due_at_step(self, step: int) -> bool:
        # With several optimizers, a batch takes several steps at once.
        period = self.check_every_n_steps
        return period is not None and step // period > self._last_step // period

    def _has_stepped(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        """Tell if anything has trained since the last check, and warn once if not."""
        if is_federated(trainer):
            return has_trained(trainer)
        # A Trainer counts no steps of optimizers that a module drives past it.
        if trainer.global_step != self._last_step or not pl_module.automatic_optimization:
            return True
        if not self._has_said_no_step:
            self._has_said_no_step = True
            rank_zero_warn(
                f"No optimizer has stepped in epoch {trainer.current_epoch}, so {type(self).__name__} makes no check "
                "after it, nor after later ones like it; is an IterableDataset used up?"
            )
        return False

    def _log(self, pl_module: pl.LightningModule, values: dict[str, float]) -> None:
        named = {f"{self.log_name}/{name}": float(value) for name, value in values.items()}
        on_step = self.check_every_n_steps is not None
        pl_module.log_dict(named, prog_bar=True, on_step=on_step, on_epoch=not on_step, batch_size=1, sync_dist=True)

    def _act(self, trainer: pl.Trainer, epoch: int, decision: StopDecision, message: str) -> None:
        """Stop the fit on all ranks if one of them wants to."""
        self._last_epoch, self._last_step = epoch, trainer.global_step
        self.wait_count = decision.count
        wanted = decision.should_stop and self._may_stop(trainer, epoch)
        if trainer.strategy.reduce_boolean_decision(wanted, all=False):
            if not self.stopped:
                self._record_stop(trainer, epoch, decision, wanted, message)
            trainer.should_stop = trainer.should_stop or not self.observe_only
        elif self.verbose:
            self._print(trainer, f"{self._place(trainer, epoch).capitalize()}: {message}")

    def _record_stop(self, trainer: pl.Trainer, epoch: int, decision: StopDecision, wanted: bool, message: str) -> None:
        is_diverged = decision.reason is StoppingReason.DIVERGED
        is_diverged = trainer.strategy.reduce_boolean_decision(is_diverged, all=False)
        self.stopped_epoch = epoch
        self.stop_round = decision.round
        self.stopping_reason = decision.reason
        if not wanted:
            self.stopping_reason = StoppingReason.DIVERGED if is_diverged else StoppingReason.SATURATED
            message = f"Another process asked to stop ({self.stopping_reason.value})."
        self.stopping_reason_message = message
        verb = "would stop" if self.observe_only else "stops"
        self._print(trainer, f"{type(self).__name__} {verb} the fit in {self._place(trainer, epoch)}. {message}")

    def _may_stop(self, trainer: pl.Trainer, epoch: int) -> bool:
        # Lightning keeps a stop wished too early until `min_epochs` and `min_steps` are met, even if the wish is gone
        # by then. Here nothing is wished before, so the criterion decides again.
        finished = epoch + (self.check_every_n_steps is None)
        min_epochs = getattr(trainer, "min_epochs", None) or 0
        min_steps = getattr(trainer, "min_steps", None) or 0
        return finished >= min_epochs and trainer.global_step >= min_steps

    def _stay_stopped(self, trainer: pl.Trainer) -> None:
        """Train nothing more in a run that was stopped before its checkpoint was written."""
        if self.stopped and not self.observe_only:
            trainer.should_stop = True
            rank_zero_warn(
                f"The run in the checkpoint was already stopped in {self._place(trainer, self.stopped_epoch)} "
                f"({self.stopping_reason.value}), so nothing more is trained. To train on, resume without this "
                f"{type(self).__name__}, or with other arguments."
            )

    def _print(self, trainer: pl.Trainer, message: str) -> None:
        rank = trainer.global_rank if trainer.world_size > 1 else None
        if not self.log_rank_zero_only or rank in (None, 0):
            log.info(rank_prefixed_message(message, rank))

    def state_dict(self) -> dict[str, Any]:
        """The criterion's state and the record of the stop."""
        return {
            "criterion": self.criterion.state_dict(),
            "last_epoch": self._last_epoch,
            "last_step": self._last_step,
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "stop_round": self.stop_round,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from a state, in ``fit`` that of its ``ckpt_path`` alone."""
        if self._keeps_its_state:
            return
        self.criterion.load_state_dict(state_dict["criterion"])
        self._last_epoch = state_dict["last_epoch"]
        self._last_step = state_dict.get("last_step", -1)
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.stop_round = state_dict["stop_round"]
        self.stopping_reason = StoppingReason(state_dict["stopping_reason"])
        self.stopping_reason_message = state_dict["stopping_reason_message"]
        self._is_resumed = True


def is_dry_run(trainer: pl.Trainer) -> bool:
    """Tell if the Trainer only tries the code out, with ``fast_dev_run``."""
    return bool(getattr(trainer, "fast_dev_run", False))


def is_federated(trainer: Any) -> bool:
    """Tell if it is a ``FederatedLoop``, whose epochs are rounds."""
    return hasattr(trainer, "clients_per_round")
