"""Record of a run: a version folder with one row a round and a summary."""

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_fedstop.utilities.files import atomic_file

ROUNDS_FILE = "metrics.csv"
SUMMARY_FILE = "summary.json"

METRICS = ("train_loss", "val_loss", "val_acc", "val_f1", "test_loss", "test_acc", "test_f1")
"""Usual names of what a module logs; a record has columns for them from the start."""

COLUMNS = (
    "round",
    "distance",
    "growth_rate",
    "wait_count",
    *METRICS,
    "lr",
    "clients",
    "trained",
    "samples",
    "bytes_down",
    "bytes_up",
    "seconds_train",
    "seconds_idle",
    "seconds_eval",
    "seconds_criterion",
)
"""Columns every record starts with; a missing value leaves its field empty."""

RESERVED = frozenset(COLUMNS).difference(METRICS).union({"skipped_steps"})
"""Columns that the loop itself fills; a module's value of that name becomes ``logged/<name>``."""

RENAMED = {
    "task_vector/distance": "distance",
    "task_vector/growth_rate": "growth_rate",
    "task_vector/wait_count": "wait_count",
}
"""Logged names that have a column of another name."""


class RunRecord(Logger):
    """Record of one run, in ``<root>/lightning_logs/version_<n>``.

    It is also the logger of a run that names no other.

    Args:
        root: folder the versions are counted in.
        name: the folder between ``root`` and the version.
        version: the version's number, or ``None`` for the next free one, taken when the record is opened.
    """

    def __init__(self, root: str | os.PathLike[str], name: str = "lightning_logs", version: int | None = None) -> None:
        super().__init__()
        self._root = Path(root)
        self._name = name
        self._version = version
        self._columns: list[str] = []

    @property
    def name(self) -> str:
        """The folder the versions lie in."""
        return self._name

    @property
    def version(self) -> int:
        """The version's number."""
        if self._version is None:
            self.open()
        assert self._version is not None
        return self._version

    @property
    def root_dir(self) -> str:
        """``<root>/<name>``."""
        return str(self._root / self._name)

    @property
    def save_dir(self) -> str:
        """``<root>``."""
        return str(self._root)

    @property
    def log_dir(self) -> str:
        """The version folder, ``<root>/<name>/version_<n>``."""
        return str(self._root / self._name / f"version_{self.version}")

    def open(self) -> None:
        """Create the next free version folder; creating claims it, so that runs never share one.

        Raises:
            OSError: if nothing can be written under ``root``.
        """
        folder = self._root / self._name
        try:
            self._claim(folder)
        except OSError as error:
            reason = f"{error.strerror}: {error.filename!r}"
            raise OSError(f"The run cannot be recorded under {str(self._root)!r} ({reason}).") from error

    def _claim(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = max((_number(path) for path in folder.glob("version_*")), default=-1) + 1
        while True:
            try:
                (folder / f"version_{number}").mkdir()
            except FileExistsError:
                number += 1
                continue
            self._version = number
            return

    def discard(self) -> None:
        """Remove the version folder, unless it holds more than is written before round 1."""
        folder = Path(self.log_dir)
        early = (".yaml", "partition.json")
        if not folder.is_dir() or not all(path.name.endswith(early) for path in folder.iterdir()):
            return
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()

    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the configuration is saved beside the record."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Nothing to do: the loop writes whole rows with :meth:`write_round`."""

    @rank_zero_only
    def write_round(self, row: Mapping[str, Any]) -> None:
        """Append one row and flush it to disk; a new name becomes the last column."""
        renamed = {RENAMED[key]: value for key, value in row.items() if key in RENAMED}
        # The server's own distance goes before the rule's, which is logged in float32 and at its checks alone.
        row = renamed | {key: value for key, value in row.items() if key not in RENAMED}
        path = Path(self.log_dir) / ROUNDS_FILE
        if not self._columns:
            self._columns = _header(path) or list(COLUMNS)
        new = [key for key in row if key not in self._columns]
        if new or not path.exists():
            self._columns += new
            self._rewrite(path)
        with path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow({key: _number_text(value) for key, value in row.items()})
            file.flush()
            os.fsync(file.fileno())

    def _rewrite(self, path: Path) -> None:
        rows = read_rounds(path) if path.exists() else []
        with atomic_file(path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)

    @rank_zero_only
    def continue_from(self, log_dir: str, last_row: Mapping[str, Any] | None, round: int) -> None:
        """Copy the rows of an earlier run, which this one continues.

        Args:
            log_dir: the earlier run's version folder; it stays as it is.
            last_row: the row of ``round`` as its checkpoint holds it, for a run that ended before writing it.
            round: the last round to take over.
        """
        earlier = Path(log_dir) / ROUNDS_FILE
        rows: list[Mapping[str, Any]] = list(read_rounds(earlier)) if earlier.exists() else []
        rows = [row for row in rows if int(row["round"]) <= round]
        # A row in the file is whole; a checkpoint may have been written before the last callback had logged.
        if last_row is not None and not any(int(row["round"]) == round for row in rows):
            rows.append(last_row)
        for row in rows:
            self.write_round({key: value for key, value in row.items() if value != ""})

    def rows(self) -> list[dict[str, str]]:
        """Read the rows written so far, as text."""
        path = Path(self.log_dir) / ROUNDS_FILE
        return read_rounds(path) if path.exists() else []

    @rank_zero_only
    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json`` aside and rename it into place."""
        with atomic_file(Path(self.log_dir) / SUMMARY_FILE) as temporary:
            temporary.write_text(json.dumps(summary, indent=2) + "\n")


def read_rounds(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """Read the rows of a ``metrics.csv`` as text; an empty field holds no value."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _header(path: Path) -> list[str]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return next(csv.reader(file), [])


def _number(path: Path) -> int:
    suffix = path.name.removeprefix("version_")
    return int(suffix) if suffix.isdigit() else -1


def _number_text(value: Any) -> Any:
    """Write integers as integers, other numbers with all their digits."""
    if isinstance(value, int | str) or value is None:
        return value
    value = float(value)
    return int(value) if value.is_integer() and abs(value) < 2**53 else repr(value)
