"""The class of each item of a data set, found without reading the items where that is possible."""

from collections.abc import Mapping, Sized
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_fedstop.data.classes import class_ids

_ITEM_KEYS = ("label", "labels", "target", "targets", "y")


def dataset_labels(dataset: Dataset[Any], read_items: bool = True, by_list: bool = False) -> NDArray[Any] | None:
    """Classes of a map-style data set, whole numbers or strings of shape ``(n,)``, or ``None`` if it has none.

    They are taken from ``targets``, ``labels`` or ``tensors[1]``, through ``Subset`` and ``ConcatDataset``, or else
    from the second part (or the ``label``, ``target``, ``y`` entry) of each item, read once. Reading items leaves the
    global random generators as they were.

    Args:
        dataset: the data set.
        read_items: whether items may be read.
        by_list: whether the data set is indexed by lists of item numbers.
    """
    if isinstance(dataset, Subset):
        whole = dataset_labels(dataset.dataset, read_items=False)
        if whole is not None:
            return whole[np.asarray(dataset.indices, dtype=np.int64)]
    elif isinstance(dataset, ConcatDataset):
        parts = [dataset_labels(part, read_items, by_list) for part in dataset.datasets]
        if all(part is not None for part in parts):
            return np.concatenate([part for part in parts if part is not None])
    else:
        found = _from_attributes(dataset)
        if found is not None:
            return found
    return _from_items(dataset, by_list) if read_items else None


def _from_attributes(dataset: Any) -> NDArray[Any] | None:
    # A target transform makes of the stored targets what a module sees: then the items are read.
    if getattr(dataset, "target_transform", None) is not None:
        return None
    for name in ("targets", "labels"):
        found = _classes(getattr(dataset, name, None), dataset)
        if found is not None:
            return found
    tensors = getattr(dataset, "tensors", None)
    return _classes(tensors[1], dataset) if isinstance(tensors, tuple) and len(tensors) > 1 else None


def _classes(values: Any, dataset: Any) -> NDArray[Any] | None:
    if values is None or not isinstance(values, (list, tuple, np.ndarray, torch.Tensor)):
        return None
    try:
        ids = class_ids(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
    except (ValueError, TypeError, RuntimeError):
        return None
    return ids if isinstance(dataset, Sized) and len(ids) == len(dataset) else None


def _from_items(dataset: Any, by_list: bool) -> NDArray[Any] | None:
    if not isinstance(dataset, Sized):
        return None
    items: Any = dataset
    labels = []
    with isolate_rng():
        for index in range(len(items)):
            value = _label_of(items[[index] if by_list else index])
            if value is None:
                return None
            labels.append(value)
    return class_ids(labels)


def _label_of(item: Any) -> int | str | None:
    value = None
    if isinstance(item, Mapping):
        value = next((item[key] for key in _ITEM_KEYS if key in item), None)
    elif isinstance(item, (tuple, list)) and len(item) > 1:
        value = item[1]
    if value is None or isinstance(value, bytes):
        return None
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):
        return None
    if array.size != 1 or array.dtype.kind not in "iubU":
        return None
    label: int | str = array.reshape(-1)[0].item()
    return label if isinstance(label, str) else int(label)
