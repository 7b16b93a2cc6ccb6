"""The experiments of arXiv 2601.22669: which runs its tables and figures need, and its numbers beside ours.

Nothing here imports torch or Lightning.
"""

from experiments.paper.runs import Run
from experiments.paper.tables import TABLES, Choice, runs_of

__all__ = ["TABLES", "Choice", "Run", "runs_of"]
