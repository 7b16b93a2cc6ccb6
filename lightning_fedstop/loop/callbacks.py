"""Callbacks of a loop: the user's, the loop's own, and those that a module configures."""

from copy import deepcopy
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar

from lightning_fedstop.loop.arguments import check_callbacks, reorder_callbacks
from lightning_fedstop.loop.progress import RoundLines, RoundProgressBar, wants_progress_bar


class LoopCallbacks:
    """The callbacks of a loop, from which those of each run are made.

    Args:
        callbacks: the user's.
        enable_progress_bar: draw a bar; ``None`` in a terminal only, and lines in the log elsewhere.
        enable_checkpointing: keep a rolling checkpoint unless the user's callbacks save some.

    Attributes:
        given: the user's and the loop's own.
        saver: the loop's own ``ModelCheckpoint``, if it has one.
    """

    def __init__(self, callbacks: list[Callback], enable_progress_bar: bool | None, enable_checkpointing: bool) -> None:
        self.given = list(callbacks)
        self.saver: ModelCheckpoint | None = None
        self._fresh: dict[Callback, dict[str, Any]] = {}
        if not any(isinstance(callback, ProgressBar) for callback in callbacks):
            if wants_progress_bar(enable_progress_bar):
                self.given.append(RoundProgressBar())
            elif enable_progress_bar is None:
                self.given.append(RoundLines())
        if enable_checkpointing and not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
            self.saver = ModelCheckpoint(filename="last", enable_version_counter=False, save_on_train_epoch_end=True)
            self.given.append(self.saver)

    def joined(self, module: LightningModule, max_rounds: int) -> list[Callback]:
        """The callbacks of a run: the module's replace the loop's of the same class."""
        configured = module.configure_callbacks()
        own = [configured] if isinstance(configured, Callback) else list(configured)
        check_callbacks(own, max_rounds)
        replaced = {type(callback) for callback in own} - {Callback}
        return reorder_callbacks([callback for callback in self.given if type(callback) not in replaced] + own)

    def reset(self, callbacks: list[Callback]) -> None:
        """Reset Lightning's monitors, which keep what they saw in an earlier fit."""
        for callback in callbacks:
            if type(callback) in (EarlyStopping, ModelCheckpoint):
                fresh = self._fresh.setdefault(callback, deepcopy(vars(callback)))
                vars(callback).clear()
                vars(callback).update(deepcopy(fresh))

    def stateful(self, callbacks: list[Callback]) -> list[Callback]:
        """The callbacks without the loop's saver, which starts clean in each folder."""
        return [callback for callback in callbacks if callback is not self.saver]
