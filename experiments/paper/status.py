"""How far a run is, from what lies in its folder."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.paper.runs import Run

Status = Literal["done", "unfinished", "missing"]


@dataclass(frozen=True)
class State:
    """How far a run is.

    Args:
        status: ``"done"``: it has a summary; ``"unfinished"``: it has a checkpoint to go on from; else ``"missing"``.
        folder: the version folder with the record of the rounds, if there is one.
    """

    status: Status
    folder: Path | None = None


def state_of(run: Run, root: str | os.PathLike[str]) -> State:
    """How far a run is.

    Args:
        run: which one.
        root: the folder of all runs.
    """
    versions = sorted((Path(root) / run.name / "lightning_logs").glob("version_*"), key=_number, reverse=True)
    for folder in versions:
        if (folder / "summary.json").is_file():
            return State("done", folder)
    # A continued run takes over the rows before, so the newest folder has them all once it has any.
    recorded = next((folder for folder in versions if (folder / "metrics.csv").is_file()), None)
    if any(next((folder / "checkpoints").glob("*.ckpt"), None) for folder in versions):
        return State("unfinished", recorded)
    return State("missing", recorded)


def _number(path: Path) -> int:
    suffix = path.name.removeprefix("version_")
    return int(suffix) if suffix.isdigit() else -1
