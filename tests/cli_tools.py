"""Shared by the tests of the command line."""

from pathlib import Path

import pytest

from lightning_fedstop.cli.main import main

ROOT = Path(__file__).parents[1]
CONF = ROOT / "tests" / "conf"
TINY = ["--config", str(CONF / "tiny.yaml")]
USER = "tests.cli_classes."


def refusal(capsys, *args):
    """The one line on stderr with which a command ends; notes on classes that were replaced may come before it."""
    with pytest.raises(SystemExit) as exit:
        main(list(args))
    assert exit.value.code == 2
    lines = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("fedstop") and ": note: " not in line
    ]
    assert len(lines) == 1
    assert ": error: " in lines[0]
    return lines[0].partition(": error: ")[2]
