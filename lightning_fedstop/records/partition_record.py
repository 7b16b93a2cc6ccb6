"""How many samples of which class each client had: written by a run, read by a report.

Reading imports neither torch nor Lightning nor NumPy, unless the partition has to be dealt again.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_fedstop.records.atomic import atomic_file

PARTITION_FILE = "partition.json"
_DATA_CLASSES = ("Digits", "MedMNIST", "NpzImages")
_SKEWS = ("DirichletSkew", "Iid", "PathologicalSkew", "QuantitySkew")


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
        whole = all(_is_count(n) for n in self.sizes) and all(_is_count(n) for row in self.counts for n in row)
        if not self.sizes or not whole:
            raise ValueError("`sizes` and `counts` of a partition must be numbers of samples, for at least 1 client.")
        if self.counts and (
            len(self.counts) != len(self.sizes)
            or any(len(row) != len(self.class_names) for row in self.counts)
            or any(sum(row) != size for row, size in zip(self.counts, self.sizes, strict=True))
        ):
            raise ValueError(
                "The `counts` of a partition must be a row a client, a number a class, and add up to `sizes`."
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def partition_counts(datamodule: Any) -> PartitionCounts:
    """What a data module has dealt, after its ``setup("fit")``: classes where it knows them, else sizes alone."""
    partition = getattr(datamodule, "_partition", None)
    labels = getattr(datamodule, "train_labels", None)
    if partition is None or labels is None or len(labels) == 0:
        return PartitionCounts([int(size) for size in datamodule.client_sizes], [], [])
    count = getattr(datamodule, "num_classes", None) or int(labels.max()) + 1
    named = getattr(datamodule, "class_names", None) or ()
    names = [str(name) for name in named] if len(named) == count else [str(k) for k in range(count)]
    counts = partition.class_counts(labels, count).tolist()
    return PartitionCounts(partition.sizes.tolist(), counts, names, partition.skew, int(partition.seed))


def write_partition(folder: str | os.PathLike[str], datamodule: Any) -> None:
    """Write ``partition.json`` into a version folder.

    Args:
        folder: the version folder.
        datamodule: after its ``setup("fit")``.
    """
    content = asdict(partition_counts(datamodule))
    if content["counts"]:
        content.pop("sizes")
    with atomic_file(Path(folder) / PARTITION_FILE) as temporary:
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")


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
        sizes = content["sizes"] if "sizes" in content else [sum(row) for row in counts]
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
    given = config.get("data")
    given = given if isinstance(given, Mapping) else {}
    name = _own(given.get("class_path"), _DATA_CLASSES, "data module")
    arguments = dict(given.get("init_args") or {})
    skew = arguments.get("skew")
    if isinstance(skew, Mapping):
        _own(skew.get("class_path"), _SKEWS, "skew")
    if arguments.get("seed") is None and isinstance(config.get("seed_everything"), int):
        arguments["seed"] = config["seed_everything"]
    if "download" in arguments:
        arguments["download"] = False

    from lightning_fedstop import data

    try:
        if isinstance(skew, Mapping):
            skew_class = getattr(data, str(skew["class_path"]).rpartition(".")[2])
            arguments["skew"] = skew_class(**(skew.get("init_args") or {}))
        datamodule = getattr(data, name)(**arguments)
        datamodule.prepare_data()
        datamodule.setup("fit")
        return partition_counts(datamodule)
    except Exception as error:  # whatever reading a file that has moved or changed since provokes
        raise ValueError(
            f"the data cannot be loaded here: {' '.join(str(error).split()) or type(error).__name__}"
        ) from None


def _own(class_path: Any, known: tuple[str, ...], kind: str) -> str:
    package, _, name = str(class_path).rpartition(".")
    if name not in known or not (
        not package or package == "lightning_fedstop" or package.startswith("lightning_fedstop.")
    ):
        raise ValueError(f"the {kind} {class_path} is not one of this package" if class_path else f"no {kind} is named")
    return name
