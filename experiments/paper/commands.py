"""The ``fedstop fit`` command of a run."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from experiments.paper.runs import PHI, Run, power

CONFIGS = Path(__file__).resolve().parent / "configs"
"""The folder of the paper's configurations."""
_COEFFICIENT_KEYS = {
    "dirichlet": "concentration",
    "pathological": "classes_per_client",
    "quantity": "concentration",
}


def config_files(run: Run) -> list[str]:
    """The configurations a run is composed of, in their order, relative to ``CONFIGS``.

    >>> config_files(Run("bloodmnist", "FedAvg", "dirichlet", 0.1, form="released_code", scale="small"))
    ['base.yaml', 'data/bloodmnist.yaml', 'skew/dirichlet.yaml', 'released_code/fedavg.yaml', 'released_code/form.yaml',
     'scale/small.yaml']
    """
    released = run.form == "released_code"
    data = "digits" if run.scale == "tiny" else run.dataset
    names = ["base", f"data/{data}", f"skew/{run.skew}"]
    names.append(f"{'released_code' if released else 'method'}/{run.method.lower()}")
    names += ["released_code/form"] if released else []
    names += [] if run.scale == "full" else [f"scale/{run.scale}"]
    return [f"{name}.yaml" for name in names]


CACHE_FOLDER = "decoded"
"""Under the root of all runs: the images, decoded once for all of them."""


def fit_arguments(
    run: Run,
    root: str | os.PathLike[str],
    data_dir: str | os.PathLike[str] | None = None,
    extra: Sequence[str] = (),
    resume: bool = False,
) -> list[str]:
    """What follows ``fedstop`` to train a run.

    Args:
        run: which one.
        root: the folder of all runs; each has a folder of its own there, and all share one for the decoded images.
        data_dir: the folder of MedMNIST's files, from which nothing is downloaded; by default they are downloaded once
            to where the ``medmnist`` package keeps them.
        extra: further arguments of ``fedstop fit``.
        resume: continue from the run's last checkpoint.
    """
    arguments = ["fit"]
    for name in config_files(run):
        arguments += ["--config", _shown(CONFIGS / name)]
    c = str(int(run.c)) if run.skew == "pathological" else f"{run.c:g}"
    arguments += [f"--data.skew.{_COEFFICIENT_KEYS[run.skew]}", c]
    if run.log_phi is not None:
        arguments += [f"--trainer.method.{PHI[run.method]}", power(run.log_phi)]
    arguments += ["--model.lr", power(run.log_lr), "--seed_everything", str(run.seed)]
    if run.scale != "tiny":
        arguments += ["--data.cache_dir", os.fspath(Path(root) / CACHE_FOLDER)]
        if data_dir is not None:
            arguments += ["--data.root", os.fspath(data_dir), "--data.download", "false"]
    arguments += ["--trainer.default_root_dir", os.fspath(Path(root) / run.name), *extra]
    return [*arguments, "--ckpt_path", "last"] if resume else arguments


def command_line(arguments: Sequence[str]) -> str:
    """The command as it is typed into a shell."""
    return shlex.join(["fedstop", *arguments])


def _shown(path: Path) -> str:
    """A path relative to the present folder if it lies in it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
