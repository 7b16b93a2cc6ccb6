"""How many samples of which class each client had: written by a run, read by a report.

Reading imports neither torch nor Lightning nor NumPy, unless the partition has to be dealt again.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fedstop.utilities.files import atomic_file

PARTITION_FILE = "partition.json"
_ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class PartitionCounts:
    """Clients by classes.

    Attributes:
        sizes: samples of each of the N clients.
        counts: samples of each of the C classes at each client, N lists of C; empty without classes.
        class_names: C names.
        skew: the skew in words; empty if it is not known.
        seed: of the draw.

    Raises:
        ValueError: if the numbers do not fit together.
    """

    sizes: list[int]
    counts: list[list[int]]
    class_names: list[str]
    skew: str = ""
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.sizes or not _are_counts(self.sizes) or not all(map(_are_counts, self.counts)):
            raise ValueError("`sizes` and `counts` of a partition must be numbers of samples, for at least 1 client.")
        if self.counts and (
            list(map(sum, self.counts)) != self.sizes or set(map(len, self.counts)) != {len(self.class_names)}
        ):
            raise ValueError(
                "The `counts` of a partition must be a row a client, a number a class, and add up to `sizes`."
            )


def _are_counts(values: list[int]) -> bool:
    # No loop of Python's: there may be a million of them.
    return set(map(type, values)) <= {int} and min(values, default=0) >= 0


def partition_counts(datamodule: Any) -> PartitionCounts:
    """What a data module has dealt, after its ``setup("fit")``: classes where it knows them, else sizes alone."""
    known, rows = _dealt(datamodule)
    if rows.ndim == 1:
        return PartitionCounts(rows.tolist(), [], **known)
    return PartitionCounts(rows.sum(1).tolist(), rows.tolist(), **known)


def _dealt(datamodule: Any) -> tuple[dict[str, Any], Any]:
    """What is known besides the numbers, and the samples of each class at each client, shape ``(N, C)``.

    Where the classes are unknown that is nothing, and the sizes, shape ``(N,)``.
    """
    import numpy as np

    from lightning_fedstop.data.classes import dealt_classes

    partition = getattr(datamodule, "_partition", None)
    if partition is None:
        return {"class_names": [], "skew": "", "seed": None}, np.asarray(datamodule.client_sizes, np.int64)
    names = dealt_classes(datamodule)
    known = {"class_names": names or [], "skew": partition.skew, "seed": int(partition.seed)}
    return known, partition.class_counts(datamodule.train_labels, len(names)) if names else partition.sizes


def write_partition(folder: str | os.PathLike[str], datamodule: Any) -> None:
    """Write ``partition.json`` into a version folder.

    Args:
        folder: the version folder.
        datamodule: after its ``setup("fit")``.
    """
    known, rows = _dealt(datamodule)
    with atomic_file(Path(folder) / PARTITION_FILE) as temporary, temporary.open("w", encoding="utf-8") as file:
        # A part at a time: as Python objects the counts of 100,000 clients would take more memory than their data.
        file.write('{"counts": [' if rows.ndim == 2 else '{"sizes": [')
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            file.write(", " * (start > 0) + json.dumps(rows[start : start + _ROWS_AT_ONCE].tolist())[1:-1])
        file.write("], " + json.dumps(known)[1:] + "\n")


def read_partition(folder: str | os.PathLike[str]) -> PartitionCounts | None:
    """Read ``partition.json`` of a version folder; ``None`` if there is none.

    Raises:
        ValueError: if it is no such file.
    """
    path = Path(folder) / PARTITION_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        counts = content.get("counts", [])
        sizes = content["sizes"] if "sizes" in content else list(map(sum, counts))
        names = [str(name) for name in content.get("class_names", [])]
        return PartitionCounts(sizes, counts, names, str(content.get("skew", "")), content.get("seed"))
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise ValueError(f"{path} is no partition that a run has written ({error}).") from None


def deal_again(config: Mapping[str, Any]) -> PartitionCounts:
    """Deal the training set as a configuration describes.

    Only data modules and skews of this package are built, and nothing is downloaded: a report runs no code that a
    configuration names.

    Args:
        config: a parsed ``config.yaml``.

    Raises:
        ValueError: if the configuration names other classes or the data cannot be read, with the reason.
    """
    from lightning_fedstop.data import ArrayDataModule, Skew

    given = config.get("data")
    given = given if isinstance(given, Mapping) else {}
    data_class = _own(given.get("class_path"), ArrayDataModule, "data module")
    arguments = dict(given.get("init_args") or {})
    skew = arguments.get("skew")
    skew_class = _own(skew.get("class_path"), Skew, "skew") if isinstance(skew, Mapping) else None
    if arguments.get("seed") is None and isinstance(config.get("seed_everything"), int):
        arguments["seed"] = config["seed_everything"]
    # Nothing is downloaded, and nothing written.
    if "download" in arguments:
        arguments["download"] = False
    arguments.pop("cache_dir", None)

    try:
        if isinstance(skew, Mapping) and skew_class is not None:
            arguments["skew"] = skew_class(**(skew.get("init_args") or {}))
        datamodule = data_class(**arguments)
        datamodule.prepare_data()
        datamodule.setup("fit")
        return partition_counts(datamodule)
    except Exception as error:  # whatever reading a file that has moved or changed since provokes
        raise ValueError(
            f"the data cannot be loaded here: {' '.join(str(error).split()) or type(error).__name__}"
        ) from None


def _own(class_path: Any, base: type, kind: str) -> Any:
    """The class of this package that a configuration names by a short name or a path; no other is imported."""
    from lightning_fedstop.data.registry import public_classes

    package, _, name = str(class_path).rpartition(".")
    found: type | None = public_classes(base).get(name)
    if found is None or package.partition(".")[0] not in ("", "lightning_fedstop"):
        raise ValueError(f"the {kind} {class_path} is not one of this package" if class_path else f"no {kind} is named")
    return found
