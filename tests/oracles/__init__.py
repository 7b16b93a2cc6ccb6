"""Numbers that the methods, rules and partitions must give, from the papers or computed apart from the package."""

import json
from pathlib import Path

FOLDER = Path(__file__).parent


def read_oracles(kind):
    """The cases of one file, ``kind.json``."""
    return json.loads((FOLDER / f"{kind}.json").read_text())
