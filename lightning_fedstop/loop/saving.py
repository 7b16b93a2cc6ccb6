"""Checkpoints: what a run needs to be continued, written and read back."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fedstop.core.client_states import SPILL_PREFIX
from lightning_fedstop.core.parameters import FlatParameters
from lightning_fedstop.core.seeding import resolve_seed
from lightning_fedstop.core.state_file import StateFile, read_states
from lightning_fedstop.federation.server import OnNonfinite
from lightning_fedstop.loop import checkpoint as checkpoints
from lightning_fedstop.loop.reporting import Recording
from lightning_fedstop.loop.resume import (
    OTHER_ARGUMENTS,
    Settings,
    client_difference,
    differences,
    run_differences,
    run_settings,
    start_of_rules,
)
from lightning_fedstop.methods import FederatedMethod
from lightning_fedstop.utilities.lock import refuse_live
from lightning_fedstop.utilities.paths import local_path

STATES_FILE = "client_states.bin"
"""The clients' vectors beside ``last.ckpt``; :mod:`lightning_fedstop.core.state_file` tells why."""

_ENTRIES = (
    "round",
    "pending",
    "row",
    "nonfinite_reason",
    "metrics",
    "theta",
    "num_clients",
    "partition",
    "seed",
    "method",
    "method_state",
    "client_states",
    "solver",
    "loss_scales",
    "unsaved_state",
    "log_dir",
)


class Saving(Recording):
    """The part of :class:`~lightning_fedstop.loop.FederatedLoop` that writes, and reads back, what a run is.

    Attributes:
        pending: whether callbacks have yet to see the present round's end.
    """

    method: FederatedMethod
    seed: int | None
    parameters: FlatParameters | None
    pending: bool
    on_nonfinite: OnNonfinite
    _state_file: StateFile | None = None
    _settings: Settings
    _has_said_objects = False
    _clients: dict[str, Any]

    def save_checkpoint(
        self, filepath: str | os.PathLike[str], weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Write an ordinary Lightning checkpoint of the global model, whichever client is training.

        Once the fit is over, the methods' vectors of each client are gone, and only the weights are saved.

        Args:
            filepath: where; written aside and renamed.
            weights_only: leave out what only continuing a run needs.
            storage_options: not supported; ``None``.

        Raises:
            ValueError: if ``storage_options`` are given.
            RuntimeError: if no fit has begun.
        """
        if storage_options is not None:
            raise ValueError("`storage_options` must be None: checkpoints are written to a local file system.")
        if self.state.fn != TrainerFn.FITTING or not hasattr(self, "server"):
            raise RuntimeError("`save_checkpoint` needs a trained model: call it during `fit` or after it.")
        weights_only = bool(weights_only) or self.parameters is None
        with self.server.holding_theta():
            checkpoint = checkpoints.dump_checkpoint(
                self.module,
                self.datamodule,
                self._stateful_callbacks(),
                epoch=self.current_epoch,
                global_step=self.global_step,
                federated={} if weights_only else self._federated_state(self._keeps_states_beside(filepath)),
                weights_only=weights_only,
            )
        if not weights_only:
            for callback in self.callbacks:
                callback.on_save_checkpoint(self, self.module, checkpoint)  # type: ignore[arg-type]
        self.module.on_save_checkpoint(checkpoint)
        if self.is_global_zero:
            left_out: list[str] = []
            checkpoint = checkpoints.storable(checkpoint, left_out)
            if left_out:
                self._warn(
                    "Checkpoints hold tensors and plain values, and objects as hyperparameters that can be pickled;"
                    f" left out: {', '.join(left_out)}."
                )
            if checkpoints.holds_objects(checkpoint) and not self._has_said_objects:
                self._has_said_objects = True
                rank_zero_info(
                    "Checkpoints of this run hold hyperparameters that are objects, as a Trainer's do: "
                    "`load_from_checkpoint(path, weights_only=False)` builds the module from them; resuming reads the"
                    " rest alone."
                )
            with self._writing(filepath, (OSError, RuntimeError)):  # torch's own writer raises the latter
                checkpoints.write_checkpoint(checkpoint, filepath)
            if self._state_file is not None and self._keeps_states_beside(filepath):
                self._state_file.settle()
        self.fabric.barrier("save_checkpoint")

    def _stateful_callbacks(self) -> list[Callback]:
        """The callbacks whose state belongs to the run: the loop's own saver starts anew in each version folder."""
        return [callback for callback in self.callbacks if callback is not self._default_checkpoint]

    def _keeps_states_beside(self, filepath: str | os.PathLike[str]) -> bool:
        """Whether it is the loop's own rolling checkpoint, which would repeat all clients' vectors each round."""
        own = self._default_checkpoint
        return own is not None and own.dirpath is not None and Path(filepath).parent == Path(own.dirpath)

    def _states_beside(self) -> dict[str, Any]:
        """Write the vectors that have changed to the file beside the loop's own checkpoint."""
        changed = self.server.changed_states()
        if self._state_file is None:
            assert self.log_dir is not None
            self._state_file = StateFile(Path(self.log_dir) / "checkpoints" / STATES_FILE)
        if not self.is_global_zero:
            return {}
        with self._writing(self._state_file.path):
            return self._state_file.write(changed)

    def _federated_state(self, states_beside: bool) -> dict[str, Any]:
        server = self.server
        where = {"client_states_beside": self._states_beside()} if states_beside else {}
        return {
            "round": self.global_step,
            "pending": self.pending,
            "row": self._full_row(),
            "nonfinite_reason": self.nonfinite_reason,
            "metrics": {name: float(value) for name, value in self.callback_metrics.items()},
            "theta": server.saved_theta,
            "distance": server.distance_state(),
            "num_clients": server.num_clients,
            "partition": self._partition_digest(),
            "clients": self._clients,
            "seed": server.seed,
            "method": type(self.method).__name__,
            "method_state": self.method.state_dict(),
            "client_states": {} if states_beside else server.states_dict(),
            **where,
            "solver": server.trainer.solver.state_dict(),
            "loss_scales": server.loss_scales(),
            "unsaved_state": server.unsaved_state(),
            "settings": self._settings,
            "other_settings": {name: getattr(self, name, None) for name in OTHER_ARGUMENTS},
            "log_dir": self.log_dir,
        }

    def _partition_digest(self) -> str | None:
        """Tells partitions apart; ``None`` where the data module deals nothing itself."""
        try:
            return str(self.datamodule.partition.digest)
        except (AttributeError, RuntimeError):
            return None

    def _read(self, ckpt_path: str | os.PathLike[str] | None) -> dict[str, Any] | None:
        """Read a checkpoint and refuse one that the run could not continue, before anything is written."""
        self.ckpt_path = None
        if ckpt_path is None:
            return None
        path: str | os.PathLike[str] = local_path(ckpt_path, "ckpt_path")
        if ckpt_path == "last":
            path = checkpoints.find_last(self.default_root_dir)
        elif ckpt_path == "best":
            path = getattr(self.checkpoint_callback, "best_model_path", "")
            if not path:
                raise FileNotFoundError("`ckpt_path='best'` needs a ModelCheckpoint that has saved a checkpoint.")
        self.ckpt_path = os.fspath(path)
        loaded = checkpoints.read_checkpoint(path)
        if self.state.fn == TrainerFn.FITTING:
            refuse_live(self.ckpt_path)
            checkpoints.check_resumable(loaded, self.ckpt_path, type(self.method).__name__, resolve_seed(self.seed))
            if beside := loaded[checkpoints.FEDERATED_KEY].get("client_states_beside"):
                loaded[checkpoints.FEDERATED_KEY]["client_states"] = read_states(beside, self.ckpt_path)
        return loaded

    def _load(self, loaded: dict[str, Any] | None) -> None:
        """Load a checkpoint's weights and its callbacks' states."""
        if loaded is None:
            return
        for owner in (self.module, self.datamodule):
            if isinstance(owner, LightningModule | LightningDataModule) and owner.hparams:
                # Not read where they are objects; a run that is continued has the same.
                loaded.setdefault(owner.CHECKPOINT_HYPER_PARAMS_KEY, dict(owner.hparams))
        self.module.on_load_checkpoint(loaded)
        try:
            checkpoints.load_weights(self.module, loaded, self.ckpt_path or "")
        except ValueError:
            if self.state.fn == TrainerFn.FITTING:
                # The settings say why, where they differ; the optimizer's are not known yet.
                self._refuse_changes(loaded[checkpoints.FEDERATED_KEY], run_settings(self))
            raise
        if self.state.fn == TrainerFn.FITTING:
            for callback in self.callbacks:
                callback.on_load_checkpoint(self, self.module, loaded)  # type: ignore[arg-type]
            checkpoints.load_callbacks(self._stateful_callbacks(), loaded)

    def _restore(self, loaded: dict[str, Any]) -> None:
        """Take the loop's own state back.

        A checkpoint written during an evaluation, before the callbacks' ``on_train_epoch_end``, is ``pending``: the
        round's rest runs before the next round starts, so that no callback misses a round.
        """
        state = loaded[checkpoints.FEDERATED_KEY]
        server = self.server
        self._check_fits(state)
        server.set_theta(state["theta"].to(server.theta))
        self.row = dict(state["row"])
        self._restore_distance(state, loaded.get("callbacks") or {})
        self.method.load_state_dict(state["method_state"])
        server.load_states(state["client_states"])
        server.trainer.solver.load_state_dict(state["solver"])
        server.trainer.loss_scale.load_state_dicts(state["loss_scales"], self.global_rank)
        server.load_unsaved_state(state["unsaved_state"])
        self.callback_metrics = {name: torch.tensor(value) for name, value in state["metrics"].items()}
        self.global_step, self.pending = state["round"], state["pending"]
        self.current_epoch = self.global_step - self.pending
        if self.on_nonfinite == "stop":
            self.nonfinite_reason = state["nonfinite_reason"]
        self.should_stop = any(self._has_stopped(callback) for callback in self.early_stopping_callbacks)
        if self.record is not None and state["log_dir"] is not None:
            last, row = self.current_epoch, None if self.pending else self.row
            self.record.continue_from(state["log_dir"], row, last)
        self._clear_away(Path(self.ckpt_path or "").resolve().parents[1])
        rank_zero_info(f"Resumed after round {self.global_step} from {self.ckpt_path}.")

    def _restore_distance(self, state: dict[str, Any], callbacks: dict[str, Any]) -> None:
        """Take back where distances are measured from; checkpoints of before have it among the states of rules."""
        distance, theta = self.server.distance, self.server.theta
        if (found := state.get("distance")) is not None:
            found = {**found, "start": None if found["start"] is None else found["start"].to(theta)}
            distance.load_state_dict(found)
            if distance.start is not None:
                self.row = {**state["row"], **distance.row()}
        elif (start := start_of_rules(callbacks, [name for name, _ in self.server.parameters.named])) is not None:
            distance.begin(start.to(theta))
            distance.next_round(state["round"], trained=True)
            distance.measure(theta)
        if distance.start is None and state["round"]:
            distance.begin(theta)
            distance.next_round(state["round"], trained=False)
            distance.measure(theta)
            self._warn(
                f"{self.ckpt_path} holds no weights that the run began with: distances are measured from those it"
                " holds."
            )

    def _clear_away(self, folder: Path) -> None:
        """Delete what a killed run had spilled to disk for itself alone: all that is needed is in its checkpoint."""
        if self.is_global_zero and folder.is_relative_to(Path(self.default_root_dir).resolve()):
            for path in folder.glob(f"{SPILL_PREFIX}*"):
                with suppress(OSError):
                    path.unlink()

    def _check_fits(self, state: dict[str, Any]) -> None:
        """Refuse the state of a run that this one would not continue.

        Raises:
            ValueError: with what differs.
        """
        path, server = self.ckpt_path, self.server
        if missing := [key for key in _ENTRIES if key not in state]:
            raise ValueError(f"{path!r} was written by another version of this package: it has no {missing[0]!r}.")
        self._refuse_changes(state, self._settings)
        if state["num_clients"] != server.num_clients:
            raise ValueError(
                f"{path!r} comes from a federation of {state['num_clients']} clients, this one has"
                f" {server.num_clients}: resume with the same data and partition."
            )
        if state["partition"] != self._partition_digest():
            raise ValueError(f"{path!r} comes from another partition: resume with the same data, skew and seed.")
        if other := client_difference(state.get("clients", {}), self._clients):
            raise ValueError(
                f"{path!r} comes from other clients ({other}): resume with the same clients in the same order."
            )
        if state["theta"].shape != server.theta.shape:
            raise ValueError(
                f"{path!r} comes from a run with {state['theta'].numel()} trainable parameters, this one has"
                f" {server.theta.numel()}: resume with the same parameters frozen."
            )
        if state["round"] > self.max_rounds and not self.fast_dev_run:
            raise ValueError(f"`max_rounds` must be at least {state['round']}, as in {path!r}, got {self.max_rounds}.")
        now = {name: getattr(self, name, None) for name in OTHER_ARGUMENTS}
        if changed := differences(state.get("other_settings", now), now):
            rank_zero_info(f"Resumed with other settings: {'; '.join(changed)}.")

    def _has_stopped(self, callback: EarlyStopping) -> bool:
        """Whether the run ended by this callback: a ``Trainer`` would train one more epoch before it stops again."""
        exhausted = callback.wait_count >= callback.patience
        return not self.pending and exhausted and callback.stopped_epoch == self.current_epoch - 1

    def _refuse_changes(self, state: dict[str, Any], settings: Settings) -> None:
        """Refuse settings that make it another run.

        Raises:
            ValueError: naming them all.
        """
        partition = self._partition_digest()
        same_partition = partition is not None and state.get("partition") == partition
        if changed := run_differences(state.get("settings", settings), settings, same_partition):
            raise ValueError(
                f"{self.ckpt_path!r} comes from another run ({'; '.join(changed)}): resume with the same settings, or"
                " start anew."
            )
