"""A class that replaces another one in a configuration starts from its own defaults."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from jsonargparse import _typehints
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_fedstop.cli.names import all_parameters, resolved, shown


@contextmanager
def own_defaults(prog: str) -> Iterator[None]:
    """Drop, within the block, all arguments of a class that another class replaces.

    Afterwards a line on stderr names what was dropped, unless the block ends in an error. jsonargparse itself keeps the
    arguments that the new class accepts too, and drops the others without a word; it has no setting for this, so its
    function is replaced for the time of the block.

    Args:
        prog: The command, which begins the line.
    """
    notes: dict[str, None] = {}  # in order, each once: a value is looked at several times

    def discard(parser_or_action: Any, before: Any, now: Any) -> None:
        old, new = (spec.get("class_path") if spec else None for spec in (before, now))
        arguments = before.get("init_args") if before else None
        if not (arguments and old and new) or resolved(old) is resolved(new):
            return
        classes = (resolved(old), resolved(new))
        names = list(arguments if isinstance(arguments, dict) else vars(arguments))
        given_now = now.get("init_args") or {}
        dropped = {name: arguments.pop(name) for name in names}
        told = [
            f"{name}={_shown(value)}"
            for name, value in dropped.items()
            if value is not None and name not in given_now and value not in [_default(cls, name) for cls in classes]
        ]
        if told:
            notes[f"{_short(new)} starts from its own defaults; dropped with {_short(old)}: {', '.join(told)}."] = None

    try:
        with patch.object(_typehints, "discard_init_args_on_class_path_change", discard):
            yield
    except SystemExit as exit:
        _say(prog, [] if exit.code else list(notes))  # 0 after `--print_config`
        raise
    _say(prog, list(notes))


@rank_zero_only  # type: ignore[misc,unused-ignore]
def _say(prog: str, notes: list[str]) -> None:
    for note in notes:
        sys.stderr.write(f"{prog}: note: {note}\n")


def _default(cls: Any, name: str) -> Any:
    parameter = all_parameters(cls).get(name) if cls is not None else None
    return inspect.Parameter.empty if parameter is None else parameter.default


def _shown(value: Any) -> str:
    path = value.get("class_path") if hasattr(value, "get") else None
    return _short(path) if path else shown(value)


def _short(path: str) -> str:
    return path.rpartition(".")[2]
