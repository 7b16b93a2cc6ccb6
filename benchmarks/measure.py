"""Several processes, each paced round by round, so that they take turns on the machine."""

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import truediv
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Figures:
    """What the rounds of one process came to.

    Attributes:
        seconds: of each round.
        peak: resident memory at its highest, in GiB.
        criterion: seconds of the stop decision in each round.
        idle: share of each round that processes or threads waited, on average, for the last one.
    """

    seconds: list[float] = field(default_factory=list)
    peak: float = 0.0
    criterion: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median seconds a round."""
        return statistics.median(self.seconds)


class Paced:
    """A process that trains one round for each line it is sent."""

    def __init__(self, module: str, work: Path, threads: int, options: Sequence[str] = ()) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", f"benchmarks.{module}", str(work), str(threads), *options]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)  # type: ignore[call-overload]
        self.figures = Figures()

    def __enter__(self) -> "Paced":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.stdin.close()
        self.process.wait()

    def round(self, counts: bool) -> None:
        """Train one round, and note what it took if it counts."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self.process.args)} has ended with code {self.process.wait()}")
        seconds, peak, *more = (float(word) for word in line.split())
        self.figures.peak = max(self.figures.peak, resident_peak(self.process.pid) or peak)
        if counts:
            self.figures.seconds.append(seconds)
            self.figures.criterion += more[:1]
            self.figures.idle += more[1:2]


def ratio(ours: Figures, floor: Figures) -> float:
    """Median over rounds, each of which is the same work for both; cohorts differ."""
    value: float = statistics.median(map(truediv, ours.seconds, floor.seconds))
    return value


def resident_peak(pid: int) -> float:
    """Resident memory of a process and its children at its highest, in GiB; 0 where the system does not say.

    ``ru_maxrss``, which a process gives itself, starts from what its parent held when it was started.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        listed = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return 0.0
    own = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)
    return own / 2**20 + sum(resident_peak(int(child)) for children in listed for child in children)


def side_by_side(contestants: Mapping[str, Paced], rounds: int) -> dict[str, Figures]:
    """Let each train one round in turn, ``rounds`` times after one to warm up."""
    for number in range(rounds + 1):
        for paced in contestants.values():
            paced.round(counts=number > 0)
    return {name: paced.figures for name, paced in contestants.items()}


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print figures; floats with three digits after the point."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row))
    Console(stderr=True).print(table)
