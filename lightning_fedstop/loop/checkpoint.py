"""Checkpoints of a loop: what a run needs to be continued, written and read back."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fedstop.core.client_states import SPILL_PREFIX
from lightning_fedstop.core.seeding import resolve_seed
from lightning_fedstop.core.state_file import StateFile, read_states
from lightning_fedstop.loop.checkpoint_file import (
    find_last,
    holds_objects,
    load_weights,
    model_checkpoint,
    read_checkpoint,
    storable,
    write_checkpoint,
)
from lightning_fedstop.loop.resume import (
    FEDERATED_KEY,
    OTHER_ARGUMENTS,
    Settings,
    check_fits,
    check_resumable,
    check_settings,
    clients_known,
    differences,
    partition_digest,
    rules_start,
    run_settings,
)
from lightning_fedstop.module.optimizer import LocalSolver
from lightning_fedstop.utilities.lock import refuse_live
from lightning_fedstop.utilities.paths import local_path

if TYPE_CHECKING:
    from lightning_fedstop.loop.federated_loop import FederatedLoop

STATES_FILE = "client_states.bin"
"""The clients' vectors beside ``last.ckpt``; :mod:`lightning_fedstop.core.state_file` tells why."""


class Checkpoints:
    """Ordinary Lightning checkpoints of a loop, with what a federation needs beside them to continue.

    Args:
        loop: the loop, whose state is written and restored.

    Attributes:
        loaded: the checkpoint that the run begins with, until all of it has been restored.
        settings: those of the present fit by which runs are told apart.
    """

    def __init__(self, loop: "FederatedLoop") -> None:
        self.loop = loop
        self.loaded: dict[str, Any] | None = None
        self.settings: Settings = {}
        self._clients: dict[str, Any] = {}
        self._state_file: StateFile | None = None
        self._has_said_objects = False

    def open(self, log_dir: str | None) -> None:
        """Let the loop's own saver write into the version folder."""
        if (saver := self.loop.own_callbacks.saver) is not None and log_dir is not None:
            saver.dirpath = os.path.join(log_dir, "checkpoints")

    def begin_fit(self, solver: LocalSolver) -> None:
        """Note what tells the fit from others.

        Args:
            solver: the module's optimizer, before a checkpoint's rates are loaded into it.
        """
        self._state_file = None
        self.settings = run_settings(self.loop, solver)
        # The digest of a partition tells more, and a list of very many clients would be most of a checkpoint.
        data = self.loop.datamodule
        self._clients = {} if partition_digest(data) else clients_known(data)

    def save(self, filepath: str | os.PathLike[str], weights_only: bool) -> None:
        """Write a checkpoint of the global model, whichever client is training; see ``FederatedLoop``."""
        loop = self.loop
        weights_only = weights_only or loop.parameters is None
        with loop.server.holding_theta():
            checkpoint = model_checkpoint(loop.module, loop.datamodule, loop.current_epoch, loop.global_step)
            if not weights_only:
                states = {
                    c.state_key: state for c in loop.own_callbacks.stateful(loop.callbacks) if (state := c.state_dict())
                }
                checkpoint |= {"callbacks": states, "optimizer_states": [], "lr_schedulers": []}
                checkpoint[FEDERATED_KEY] = self._federated_state(self._is_own(filepath))
        if not weights_only:
            for callback in loop.callbacks:
                callback.on_save_checkpoint(loop, loop.module, checkpoint)  # type: ignore[arg-type]
        loop.module.on_save_checkpoint(checkpoint)
        if loop.is_global_zero:
            self._write(checkpoint, filepath)
        loop.fabric.barrier("save_checkpoint")

    def _write(self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str]) -> None:
        left_out: list[str] = []
        checkpoint = storable(checkpoint, left_out)
        if left_out:
            rank_zero_warn(
                "Checkpoints hold tensors and plain values, and objects as hyperparameters that can be pickled;"
                f" left out: {', '.join(left_out)}."
            )
        if holds_objects(checkpoint) and not self._has_said_objects:
            self._has_said_objects = True
            rank_zero_info(
                "Checkpoints of this run hold hyperparameters that are objects, as a Trainer's do: "
                "`load_from_checkpoint(path, weights_only=False)` builds the module from them; resuming reads the"
                " rest alone."
            )
        with self.loop.reporter.writing(filepath, (OSError, RuntimeError)):  # torch's own writer raises the latter
            write_checkpoint(checkpoint, filepath)
        if self._state_file is not None and self._is_own(filepath):
            self._state_file.settle()

    def _is_own(self, filepath: str | os.PathLike[str]) -> bool:
        """Check for the loop's own rolling checkpoint, which would repeat all clients' vectors each round."""
        own = self.loop.own_callbacks.saver
        return own is not None and own.dirpath is not None and Path(filepath).parent == Path(own.dirpath)

    def _states_beside(self) -> dict[str, Any]:
        """Write the vectors that have changed to the file beside the loop's own checkpoint."""
        loop = self.loop
        changed = loop.server.changed_states()
        if self._state_file is None:
            assert loop.log_dir is not None
            self._state_file = StateFile(Path(loop.log_dir) / "checkpoints" / STATES_FILE)
        if not loop.is_global_zero:
            return {}
        with loop.reporter.writing(self._state_file.path):
            return self._state_file.write(changed)

    def _federated_state(self, states_beside: bool) -> dict[str, Any]:
        loop, server = self.loop, self.loop.server
        where = {"client_states_beside": self._states_beside()} if states_beside else {}
        return {
            "round": loop.global_step,
            "pending": loop.pending,
            "row": loop.reporter.full_row(),
            "nonfinite_reason": loop.nonfinite_reason,
            "metrics": {name: float(value) for name, value in loop.callback_metrics.items()},
            "theta": server.saved_theta,
            "distance": server.distance_state(),
            "num_clients": server.num_clients,
            "partition": partition_digest(loop.datamodule),
            "clients": self._clients,
            "seed": server.seed,
            "method": type(loop.method).__name__,
            "method_state": loop.method.state_dict(),
            "client_states": {} if states_beside else server.states_dict(),
            **where,
            "solver": server.trainer.solver.state_dict(),
            "loss_scales": server.loss_scales(),
            "unsaved_state": server.unsaved_state(),
            "settings": self.settings,
            "other_settings": {name: getattr(loop, name) for name in OTHER_ARGUMENTS},
            "log_dir": loop.log_dir,
        }

    def read(self, ckpt_path: str | os.PathLike[str] | None) -> None:
        """Read a checkpoint and refuse one that the run cannot continue.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: if it cannot be read or continued.
        """
        loop = self.loop
        self.loaded = loop.ckpt_path = None
        if ckpt_path is None:
            return
        path: str | os.PathLike[str] = local_path(ckpt_path, "ckpt_path")
        if ckpt_path == "last":
            path = find_last(loop.default_root_dir)
        elif ckpt_path == "best":
            path = getattr(loop.checkpoint_callback, "best_model_path", "")
            if not path:
                raise FileNotFoundError("`ckpt_path='best'` needs a ModelCheckpoint that has saved a checkpoint.")
        loop.ckpt_path = os.fspath(path)
        loaded = read_checkpoint(path)
        if loop.state.fn == TrainerFn.FITTING:
            refuse_live(loop.ckpt_path)
            check_resumable(loaded, loop.ckpt_path, type(loop.method).__name__, resolve_seed(loop.seed))
            if beside := loaded[FEDERATED_KEY].get("client_states_beside"):
                loaded[FEDERATED_KEY]["client_states"] = read_states(beside, loop.ckpt_path)
        self.loaded = loaded

    def load(self) -> None:
        """Load the checkpoint's weights and, for a fit, its callbacks' states."""
        loop, loaded = self.loop, self.loaded
        if loaded is None:
            return
        fits = loop.state.fn == TrainerFn.FITTING
        for owner in (loop.module, loop.datamodule):
            if isinstance(owner, LightningModule | LightningDataModule) and owner.hparams:
                # Not read where they are objects; a run that is continued has the same.
                loaded.setdefault(owner.CHECKPOINT_HYPER_PARAMS_KEY, dict(owner.hparams))
        loop.module.on_load_checkpoint(loaded)
        try:
            load_weights(loop.module, loaded, loop.ckpt_path or "")
        except ValueError:
            if fits:
                # The settings say why, where they differ; the optimizer's are not known yet.
                digest = partition_digest(loop.datamodule)
                check_settings(loaded[FEDERATED_KEY], run_settings(loop), digest, loop.ckpt_path)
            raise
        if not fits:
            return
        for callback in loop.callbacks:
            callback.on_load_checkpoint(loop, loop.module, loaded)  # type: ignore[arg-type]
        states = loaded.get("callbacks") or {}
        for callback in loop.own_callbacks.stateful(loop.callbacks):
            if (state := states.get(callback.state_key)) is not None:
                callback.load_state_dict(state)

    def restore(self) -> None:
        """Restore the state of loop, server, method and optimizer from the checkpoint that was read.

        A checkpoint written during an evaluation, before the callbacks' ``on_train_epoch_end``, is ``pending``: the
        round's rest runs before the next round starts, so that no callback misses a round.

        Raises:
            ValueError: if it is another run's, with what differs.
        """
        loop, server = self.loop, self.loop.server
        if self.loaded is None:
            return
        state = self.loaded[FEDERATED_KEY]
        self._check_fits(state)
        server.set_theta(state["theta"].to(server.theta))
        loop.reporter.row = dict(state["row"])
        self._restore_distance(state, self.loaded.get("callbacks") or {})
        loop.method.load_state_dict(state["method_state"])
        server.load_states(state["client_states"])
        server.trainer.solver.load_state_dict(state["solver"])
        server.trainer.loss_scale.load_state_dicts(state["loss_scales"], loop.global_rank)
        server.load_unsaved_state(state["unsaved_state"])
        loop.callback_metrics = {name: torch.tensor(value) for name, value in state["metrics"].items()}
        loop.global_step, loop.pending = state["round"], state["pending"]
        loop.current_epoch = loop.global_step - loop.pending
        if loop.on_nonfinite == "stop":
            loop.nonfinite_reason = state["nonfinite_reason"]
        loop.should_stop = any(self._has_stopped(callback) for callback in loop.early_stopping_callbacks)
        if loop.record is not None and state["log_dir"] is not None:
            row = None if loop.pending else loop.row
            loop.record.continue_from(state["log_dir"], row, loop.current_epoch)
        self._clear_away(Path(loop.ckpt_path or "").resolve().parents[1])
        rank_zero_info(f"Resumed after round {loop.global_step} from {loop.ckpt_path}.")
        self.loaded = None

    def _check_fits(self, state: dict[str, Any]) -> None:
        loop, server = self.loop, self.loop.server
        now = {
            "settings": self.settings,
            "num_clients": server.num_clients,
            "partition": partition_digest(loop.datamodule),
            "clients": self._clients,
            "theta": server.theta,
        }
        check_fits(state, now, loop.ckpt_path)
        if state["round"] > loop.max_rounds and not loop.fast_dev_run:
            raise ValueError(
                f"`max_rounds` must be at least {state['round']}, as in {loop.ckpt_path!r}, got {loop.max_rounds}."
            )
        others = {name: getattr(loop, name) for name in OTHER_ARGUMENTS}
        if changed := differences(state.get("other_settings", others), others):
            rank_zero_info(f"Resumed with other settings: {'; '.join(changed)}.")

    def _restore_distance(self, state: dict[str, Any], callbacks: dict[str, Any]) -> None:
        """Restore the start of distances, which older checkpoints hold in the states of rules."""
        server = self.loop.server
        distance, theta = server.distance, server.theta
        if (found := state.get("distance")) is not None:
            found = {**found, "start": None if found["start"] is None else found["start"].to(theta)}
            distance.load_state_dict(found)
            if distance.start is not None:
                self.loop.row.update(distance.row())
        elif (start := rules_start(callbacks, [name for name, _ in server.parameters.named])) is not None:
            distance.begin(start.to(theta))
            distance.next_round(state["round"], trained=True)
            distance.measure(theta)
        if distance.start is None and state["round"]:
            distance.begin(theta)
            distance.next_round(state["round"], trained=False)
            distance.measure(theta)
            rank_zero_warn(
                f"{self.loop.ckpt_path} holds no weights that the run began with: distances are measured from those"
                " it holds."
            )

    def _has_stopped(self, callback: EarlyStopping) -> bool:
        """Check if this callback ended the run, which a ``Trainer`` would train one epoch more."""
        exhausted = callback.wait_count >= callback.patience
        return not self.loop.pending and exhausted and callback.stopped_epoch == self.loop.current_epoch - 1

    def _clear_away(self, folder: Path) -> None:
        """Delete files that a killed run spilled to disk; its checkpoint has all that is needed."""
        if self.loop.is_global_zero and folder.is_relative_to(Path(self.loop.default_root_dir).resolve()):
            for path in folder.glob(f"{SPILL_PREFIX}*"):
                with suppress(OSError):
                    path.unlink()
