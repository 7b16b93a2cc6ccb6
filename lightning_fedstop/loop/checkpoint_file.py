"""Files of checkpoints, which are read without unpickling anything but tensors and plain values."""

import os
import zipfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_fedstop.loop.pickled import Pickled, Unread, objects_unread
from lightning_fedstop.loop.resume import FEDERATED_KEY
from lightning_fedstop.utilities.files import atomic_file, reason_unreadable
from lightning_fedstop.utilities.paths import walk
from lightning_fedstop.utilities.plain import is_plain, plain_state

HYPER_PARAMETERS = {
    *(LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE),
    *(LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY, LightningDataModule.CHECKPOINT_HYPER_PARAMS_TYPE),
}
"""The entries of a checkpoint that may hold objects, as a ``Trainer``'s do; resuming does not read them."""


def model_checkpoint(
    module: LightningModule, datamodule: LightningDataModule | None, epoch: int, global_step: int
) -> dict[str, Any]:
    """The part of a checkpoint that every ``Trainer`` reads, in the layout of ``Trainer.save_checkpoint``.

    Args:
        module: holds the global model, which is copied.
        datamodule: its hyperparameters and state go along.
        epoch: ``current_epoch``, as in a ``Trainer``.
        global_step: server updates so far.
    """
    checkpoint: dict[str, Any] = {
        "epoch": epoch,
        "global_step": global_step,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": {name: value.detach().clone() for name, value in module.state_dict().items()},
    }
    for owner in (module, datamodule):
        if owner is not None and owner.hparams:
            checkpoint |= _hyper_parameters(owner)
    if datamodule is not None and (state := datamodule.state_dict()):
        checkpoint[type(datamodule).__qualname__] = state
    return checkpoint


def _hyper_parameters(owner: Any) -> dict[str, Any]:
    """The entries by which ``load_from_checkpoint`` builds a module again, as a ``Trainer`` writes them."""
    entries = {owner.CHECKPOINT_HYPER_PARAMS_KEY: owner.hparams}
    if owner._hparams_name:
        entries[owner.CHECKPOINT_HYPER_PARAMS_NAME] = owner._hparams_name
    if type(owner.hparams).__module__.startswith("omegaconf."):
        return entries | {owner.CHECKPOINT_HYPER_PARAMS_TYPE: type(owner.hparams)}
    return entries | {owner.CHECKPOINT_HYPER_PARAMS_KEY: dict(owner.hparams)}


def storable(checkpoint: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Make a checkpoint storable: plain, with the objects among hyperparameters pickled apart.

    Args:
        checkpoint: as hooks have left it.
        left_out: gets the names of the entries that can be neither.
    """
    found = plain_state({key: value for key, value in checkpoint.items() if key not in HYPER_PARAMETERS}, left_out)
    for key in HYPER_PARAMETERS & checkpoint.keys():
        found[key] = checkpoint[key] if is_plain(checkpoint[key]) else _pickled(checkpoint[key], key, left_out)
    return found


def _pickled(value: Any, name: str, left_out: list[str]) -> Any:
    """Hyperparameters as one pickle, without those that cannot be pickled."""
    if _is_picklable(value):
        return Pickled(value)
    if not isinstance(value, dict):
        left_out.append(name)
        return {}
    kept = {key: item for key, item in value.items() if is_plain(item) or _is_picklable(item)}
    left_out += [f"{name}.{key}" for key in value if key not in kept]
    return kept if is_plain(kept) else Pickled(kept)


def _is_picklable(value: Any) -> bool:
    try:
        Pickled(value)
    except Exception:  # an object's own methods take part
        return False
    return True


def holds_objects(stored: dict[str, Any]) -> bool:
    """Check if a checkpoint needs ``weights_only=False`` to be read whole."""
    return any(isinstance(value, Pickled) for value in stored.values())


def write_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write aside, flush and rename, so that ``path`` is always a whole checkpoint."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        torch.save(checkpoint, temporary)


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load a checkpoint onto the CPU without unpickling anything but tensors and plain values.

    Hyperparameters that are kept as objects are not among what is read.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is no checkpoint, or holds other objects than tensors and plain values.
    """
    if not os.path.isfile(path):
        what = ", which is a folder: give the file in it" if os.path.isdir(path) else ""
        raise FileNotFoundError(f"There is no checkpoint at {os.fspath(path)!r}{what}.")
    try:
        # torch.load checks neither that the archive is whole nor its sums.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        with objects_unread():
            checkpoint = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{os.fspath(path)!r} cannot be read as a checkpoint: {reason_unreadable(error)}.") from error
    if damaged:
        raise ValueError(f"{os.fspath(path)!r} cannot be read as a checkpoint: it is damaged, in {damaged!r}.")
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise ValueError(f"{os.fspath(path)!r} is no Lightning checkpoint: it has no 'state_dict'.")
    return {key: value for key, value in checkpoint.items() if not isinstance(value, Unread)}


def load_weights(module: LightningModule, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Load a checkpoint's weights into a module.

    Raises:
        ValueError: if they are another model's.
    """
    try:
        module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
    except RuntimeError as error:
        detail = " ".join(str(error).split())
        detail = detail if len(detail) < 400 else detail[:400] + " ..."
        raise ValueError(f"{os.fspath(path)!r} holds another model than {type(module).__name__}: {detail}") from error


def find_last(root: str | os.PathLike[str]) -> Path:
    """Find the newest checkpoint under ``root`` that a run can continue from.

    Raises:
        FileNotFoundError: if there is none.
    """
    paths = [folder / name for folder, names in walk(root) for name in names if name.endswith(".ckpt")]
    paths = [path for path in paths if path.is_file() and not path.name.startswith(".")]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if _is_resumable(path):
            return path
    raise FileNotFoundError(f"`ckpt_path='last'` found no checkpoint of a run under {os.fspath(root)!r}.")


def _is_resumable(path: Path) -> bool:
    """Check for more than weights; an unreadable file counts, so that reading it says why."""
    try:
        with objects_unread():
            return FEDERATED_KEY in torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception:
        return True
