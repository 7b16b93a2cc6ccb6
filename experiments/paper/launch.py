"""Runs several runs at once, each in a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lightning_fedstop.loop.signals import SignalGuard

COMMAND = [sys.executable, "-m", "lightning_fedstop"]
LOG_FILE = "output.txt"
SECONDS_TO_END = 30.0
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Job:
    """One run to train.

    Args:
        name: as it is shown.
        arguments: what follows ``fedstop``.
        folder: where its output goes, ``output.txt``.
    """

    name: str
    arguments: Sequence[str]
    folder: Path


@dataclass
class _Child:
    job: Job
    process: "subprocess.Popen[bytes]"
    output: IO[bytes]
    slot: int
    began: float = field(default_factory=time.monotonic)


def run_jobs(
    jobs: Sequence[Job], at_once: int, devices: Sequence[str] = (), report: Callable[[str], Any] = print
) -> list[str]:
    """Run each job; one that fails does not end the others.

    Args:
        jobs: in the order in which they begin.
        at_once: how many processes run at a time; they share out the processor's cores as threads.
        devices: numbers of the accelerators, dealt to the processes in turn; by default each sees all and takes one.
        report: called with a line whenever a job ends.

    Returns:
        The names of those that failed.

    Raises:
        KeyboardInterrupt: after Ctrl-C, when all processes have ended.
        Terminated: after another signal that ends a process, likewise.
    """
    waiting, running, failed, ended = list(jobs), list[_Child](), list[str](), 0
    with SignalGuard() as signals:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    slot = next(slot for slot in range(at_once) if slot not in [child.slot for child in running])
                    with signals.shielded():  # a process that has been started is one that is ended
                        running.append(_start(waiting.pop(0), slot, at_once, devices))
                time.sleep(0.05)
                for child in [child for child in running if child.process.poll() is not None]:
                    running.remove(child)
                    child.output.close()
                    ended += 1
                    code, seconds = child.process.returncode, time.monotonic() - child.began
                    if code:
                        failed.append(child.job.name)
                    how = f"failed with exit code {code}, see {child.job.folder / LOG_FILE}" if code else "done"
                    report(f"[{ended}/{len(jobs)}] {child.job.name}: {how} ({seconds:.0f} s)")
        except BaseException:
            _end(running)
            raise
    return failed


def child_environment(slot: int, at_once: int, devices: Sequence[str] = ()) -> dict[str, str]:
    """The environment of a process: its share of the cores, unless the user has set it, and its accelerator."""
    environment = dict(os.environ)
    threads = str(max(1, _cores() // at_once))
    for name in _THREADS:
        environment.setdefault(name, threads)
    if devices:
        # ROCm reads either name and PyTorch refuses two that differ.
        environment.update(dict.fromkeys(_DEVICES, devices[slot % len(devices)]))
    return environment


def _cores() -> int:
    # Those this process may use, where the system tells; a batch system gives out fewer than there are.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(job: Job, slot: int, at_once: int, devices: Sequence[str]) -> _Child:
    job.folder.mkdir(parents=True, exist_ok=True)
    output = (job.folder / LOG_FILE).open("ab")
    process = subprocess.Popen(
        [*COMMAND, *job.arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=child_environment(slot, at_once, devices),
        # Ctrl-C in the terminal reaches this process alone, which passes it on.
        start_new_session=True,
    )
    return _Child(job, process, output, slot)


def _end(children: Sequence[_Child]) -> None:
    """Terminate the processes, which keep their finished rounds, and kill those that do not listen.

    Not by SIGINT: what a script has started in the background ignores it, and so does all that it starts.
    """
    for child in children:
        if child.process.poll() is None:
            child.process.terminate()
    deadline = time.monotonic() + SECONDS_TO_END
    try:
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
    finally:  # also when the user does not want to wait
        for child in children:
            if child.process.poll() is None:
                child.process.kill()
                child.process.wait()
            child.output.close()
