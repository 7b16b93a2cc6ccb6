"""The paper's numbers, from ``results.json``."""

import json
import math
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def paper_results() -> dict[str, Any]:
    """The content of ``results.json``: Tables I to IV whole, and what the text quotes of Figures 5 to 8."""
    text = (files("experiments.paper") / "results.json").read_text(encoding="utf-8")
    results: dict[str, Any] = json.loads(text)
    return results


def by_skew(dataset: str, skew: str, method: str) -> tuple[float, int | None]:
    """Accuracy in percent and log10 of the Phi of Table I; Phi is ``None`` for a method that has none.

    >>> by_skew("bloodmnist", "quantity", "FedProx")
    (98.02, -2)
    """
    rows = paper_results()["table1_accuracy_by_skew"]
    row = next(row for row in rows if row["dataset"] == dataset and row["skew"].startswith(f"{skew}-"))
    return row["accuracy"][method], row["log_phi"].get(method)


def by_lr(dataset: str, log_lr: int, method: str) -> tuple[float, int | None]:
    """The same of Table II.

    >>> by_lr("bloodmnist", -1, "FedAvg")
    (12.5, None)
    """
    rows = paper_results()["table2_accuracy_by_lr"]
    row = next(row for row in rows if row["dataset"] == dataset and math.isclose(row["lr"], 10.0**log_lr))
    return row["accuracy"][method], row["log_phi"].get(method)


def find(key: str, field: str, *parts: str, **where: Any) -> float | None:
    """The number of a cell of the paper; ``None`` where it gives none.

    Args:
        key: the table's key in ``results.json``.
        field: the number wanted.
        *parts: keys within the table's object that lead to the cells; a cell itself may be where they end.
        **where: what the cell must hold, ``None`` for what it must not.

    >>> find("table3_delta_accuracy", "delta_accuracy", dataset="dermamnist", method="FedAvg", skew="dirichlet", c=0.01)
    16.55
    """
    found: Any = paper_results()[key]
    for part in parts:
        found = found.get(part, {})
    for cell in [found] if isinstance(found, dict) else found:
        if field in cell and all(cell.get(name) == value for name, value in where.items()):
            return float(cell[field])
    return None
