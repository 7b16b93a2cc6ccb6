"""An array job that trains a list of runs under SLURM."""

import shlex
from collections.abc import Mapping, Sequence

MAX_TASKS = 1000
"""Array indices stay below SLURM's default `MaxArraySize`, 1001; further runs share a task, one after another."""
DEFAULTS = {"time": "24:00:00", "gres": "gpu:1", "cpus-per-task": "8", "mem": "32G"}
"""Options of ``sbatch`` where the user gives none."""


def array_script(
    name: str,
    jobs: Sequence[tuple[str, Sequence[str]]],
    options: Mapping[str, str],
    setup: str | None = None,
    notes: Sequence[str] = (),
) -> str:
    """A script for ``sbatch``; submitted again, or put back into the queue, it goes on where each run is.

    Args:
        name: of the job.
        jobs: of each run, its folder and the arguments of ``fedstop`` that start it anew.
        options: of ``sbatch``, without dashes; an empty value leaves out one of ``DEFAULTS``.
        setup: a line of shell that makes ``fedstop`` available.
        notes: lines of comment.

    Raises:
        ValueError: if there is no run.
    """
    if not jobs:
        raise ValueError("There is no run left to submit.")
    tasks = min(len(jobs), MAX_TASKS)
    given = {**DEFAULTS, **options}
    header = {"job-name": name, "array": f"0-{tasks - 1}", "output": f"{name}-%A_%a.txt", **given}
    lines = ["#!/bin/bash", *(f"#SBATCH --{key}={value}" for key, value in header.items() if value)]
    lines += [
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"# {len(jobs)} runs in {tasks} tasks. Which accelerator a task has is SLURM's to say (CUDA and ROCm alike).",
        "# Submit it from the folder it was made in, and again to go on with what has not ended.",
        *(f"# {note}" for note in notes),
        "set -u",
        *([] if setup is None else [setup]),
        'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"',
        "",
        "run() {  # folder of the run, arguments",
        '    local folder="$1" last=()',
        "    shift",
        '    compgen -G "$folder/lightning_logs/version_*/summary.json" > /dev/null && return 0',
        '    compgen -G "$folder/lightning_logs/version_*/checkpoints/*.ckpt" > /dev/null && last=(--ckpt_path last)',
        '    fedstop "$@" ${last[@]+"${last[@]}"}',
        "}",
        "",
        "status=0",
        f"for ((i = SLURM_ARRAY_TASK_ID; i < {len(jobs)}; i += {tasks})); do",
        "    case $i in",
        *(f"    {i}) run {shlex.join([folder, *arguments])} ;;" for i, (folder, arguments) in enumerate(jobs)),
        "    esac || status=1",
        "done",
        "exit $status",
    ]
    return "\n".join(lines) + "\n"
