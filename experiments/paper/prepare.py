"""Fetches what several runs need before they begin at once."""

import os
import subprocess
import sys
from collections.abc import Sequence

from experiments.paper.runs import Run

_PIXELS = {"full": 64, "small": 28}
_BACKBONES = {"full": "convnextv2_nano", "small": "convnextv2_atto"}
_FETCH_DATA = (
    "import sys; from lightning_fedstop.data import MedMNIST; "
    "MedMNIST(sys.argv[1], int(sys.argv[2]), download=True).prepare_data()"
)
_FETCH_WEIGHTS = (
    "import sys; from lightning_fedstop.models import ImageClassifier; "
    "ImageClassifier(sys.argv[1], num_classes=2, pretrained=True)"
)


def prepare(runs: Sequence[Run], data_dir: str | os.PathLike[str] | None = None, weights: bool = False) -> list[str]:
    """Download the data sets that are missing: two runs would write the same file.

    Args:
        runs: that are about to begin.
        data_dir: a folder that has the files; then no data is downloaded.
        weights: fetch the starting weights too, for runs where there is no network.

    Returns:
        What is there now, a phrase each.

    Raises:
        RuntimeError: if a download fails.
    """
    there = []
    pairs = {(run.dataset, run.scale) for run in runs if run.scale != "tiny"}
    for dataset, scale in sorted(pairs if data_dir is None else ()):
        what = f"the data set {dataset} of {_PIXELS[scale]} pixels"
        _fetch(what, _FETCH_DATA, dataset, str(_PIXELS[scale]))
        there.append(what)
    for scale in sorted({scale for _, scale in pairs} if weights else ()):
        what = f"the weights of {_BACKBONES[scale]}"
        _fetch(what, _FETCH_WEIGHTS, _BACKBONES[scale])
        there.append(what)
    return there


def _fetch(what: str, code: str, *arguments: str) -> None:
    """In a process of its own, since this one imports no torch."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "unknown").splitlines()[-1]
        raise RuntimeError(f"{what[:1].upper()}{what[1:]} could not be fetched: {reason.partition(': ')[2] or reason}")
