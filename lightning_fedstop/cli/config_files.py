"""Looks at the files that ``--config`` names before they are parsed, so that a refusal can name the file."""

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]
from lightning_utilities.core.enums import StrEnum

from lightning_fedstop.cli.names import misformed, shown

_SECTIONS = ("trainer", "model", "data")
_CLASSES = ("trainer", "model", "data", "optimizer", "lr_scheduler")
# A file of a few anchors that name each other can stand for more values than memory holds.
MAX_VALUES = 100_000

# Some callbacks have a default that is such a word, which could not be written into `config.yaml` otherwise.
yaml.SafeDumper.add_multi_representer(StrEnum, lambda dumper, word: dumper.represent_str(word.value))


class _Loader(yaml.SafeLoader):  # type: ignore[misc,unused-ignore]
    """Refuses a key that is given twice, of which YAML would silently take the last."""

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        # Before anything is constructed, as that writes merged keys (`<<: *base`) into the nodes.
        _count(node, {}, set())
        return node


def _count(node: Any, counted: dict[int, int], above: set[int]) -> int:
    """The values that a node stands for once its anchors are filled in.

    Args:
        node: the node.
        counted: what is known of nodes already, by their identity.
        above: the nodes that hold this one.
    """
    if id(node) in above:
        raise yaml.constructor.ConstructorError(None, None, "an anchor holds itself", node.start_mark)
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if isinstance(node, yaml.MappingNode) and id(node) not in counted:
        _check_keys([key for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
    if id(node) not in counted:
        parts = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
        inside = above | {id(node)}
        counted[id(node)] = 1 + sum(_count(part, counted, inside) for part in parts)
    if counted[id(node)] > MAX_VALUES:
        message = f"its anchors stand for more than {MAX_VALUES} values"
        raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
    return counted[id(node)]


def _check_keys(keys: list[Any]) -> None:
    names: set[str] = set()
    for key in keys:
        if key.value in names:
            raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is there twice", key.start_mark)
        names.add(key.value)


def check_configs(args: list[str]) -> None:
    """Refuse a configuration file that cannot be read, or of the wrong shape.

    Args:
        args: the command line.

    Raises:
        ValueError: naming the file and what it must hold.
    """
    for value in _config_values(args):
        if not value:
            raise ValueError("--config: needs the name of a file, as in `--config x.yaml`, got nothing.")
        if os.path.isfile(value):
            _check(f"--config {value}", _read(value))
        elif isinstance(content := _from_text(value), dict):
            _check("--config", content)


def is_named(section: str, args: list[str]) -> bool:
    """Whether the command line, or a file that it names, says anything of a section.

    >>> is_named("model", ["fit", "--model.lr", "0.1"]), is_named("model", ["fit", "--trainer.max_rounds=3"])
    (True, False)
    """
    contents = [_read(value) if os.path.isfile(value) else _from_text(value) for value in _config_values(args)]
    keys = {arg.lstrip("-").partition("=")[0].partition(".")[0] for arg in args if arg.startswith("--")}
    # Below a command's name too: a file may hold several.
    parts = [part for content in contents for part in _itself_and_below(content) if isinstance(part, dict)]
    return section in keys or any(section in part for part in parts)


def _config_values(args: list[str]) -> list[str]:
    values = [b for a, b in pairwise(args) if a in ("-c", "--config")]
    values += [arg.partition("=")[2] for arg in args if arg.startswith("--config=")]
    return [os.path.expanduser(value) for value in values]


def _itself_and_below(content: Any) -> list[Any]:
    return [content, *content.values()] if isinstance(content, dict) else []


def _from_text(value: str) -> Any:
    """The content of a value that is no file but the configuration itself; the parser judges one that is neither."""
    try:
        return yaml.load(value, _Loader)
    except RecursionError:
        raise ValueError("--config: the text is nested too deeply.") from None
    except yaml.constructor.ConstructorError as error:
        raise ValueError(f"--config: {_reason(error)}.") from None
    except (yaml.YAMLError, ValueError):
        return None


def _read(path: str) -> Any:
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except UnicodeDecodeError:
        raise ValueError(f"--config {path}: it is not text in UTF-8.") from None
    except OSError as error:
        raise ValueError(f"--config {path}: it cannot be read: {error.strerror}.") from None
    except RecursionError:
        raise ValueError(f"--config {path}: it is nested too deeply.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"--config {path}: {_reason(error)}.") from None


def _reason(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f", in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    problem = str(getattr(error, "problem", None) or error).strip()
    if match := re.search(r"constructor for the tag '([^']+)'", problem):
        return f"it holds the tag '{match[1]}', but only plain YAML is read{where}"
    problem = problem.replace("character '\\t'", "a tab").replace(
        "but found another document", "there are several documents in it"
    )
    own = ("is there twice", "holds itself", "values")
    text = re.sub(r"\s+", " ", problem.partition('in "<unicode string>"')[0]).strip()
    return f"{text}{where}" if text.endswith(own) else f"it is not YAML: {text.rstrip('.')}{where}"


def _check(where: str, content: Any) -> None:
    if not isinstance(content, dict):
        held = "nothing" if content is None else shown(content)
        raise ValueError(f"{where}: it must hold keys such as `trainer:`, but holds {held}.")
    for name, value in content.items():
        if not isinstance(name, str):
            raise ValueError(f"{where}: each key must be a name such as `trainer`, got {shown(name)}.")
        if name in _SECTIONS and not isinstance(value, dict | str):
            held = "nothing" if value is None else shown(value)
            raise ValueError(f"{where}: `{name}:` must hold keys of its own, but holds {held}.")
        if name in _CLASSES:
            _check_classes(where, name, value)
    trainer = content.get("trainer")
    for key in trainer if isinstance(trainer, dict) else ():
        if not isinstance(key, str):
            raise ValueError(f"{where}: trainer: each key must be a name such as `max_rounds`, got {shown(key)}.")


def _check_classes(where: str, key: str, value: Any) -> None:
    """Refuse the configuration of a class that has another form, at any depth."""
    if wrong := misformed(key, value):
        raise ValueError(f"{where}: {wrong}")
    parts: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        inner = f"{key}[{name}]" if isinstance(value, list) else key if name == "init_args" else f"{key}.{name}"
        _check_classes(where, inner, part)
