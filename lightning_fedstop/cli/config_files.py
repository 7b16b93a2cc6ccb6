"""Checks of configuration files before they are parsed, so that a refusal names the file."""

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]
from lightning_utilities.core.enums import StrEnum

from lightning_fedstop.cli.names import CLASS_KEYS, shown

_SECTIONS = ("trainer", "model", "data")
# A file of a few anchors that name each other can stand for more values than memory holds.
MAX_VALUES = 100_000

# Some callbacks have a default that is such a word, which could not be written into `config.yaml` otherwise.
yaml.SafeDumper.add_multi_representer(StrEnum, lambda dumper, word: dumper.represent_str(word.value))


class _Loader(yaml.SafeLoader):  # type: ignore[misc,unused-ignore]
    """Loader of plain YAML that refuses repeated keys: YAML would silently take the last."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Compose one mapping; here no merged keys (`<<: *base`) are written into it yet."""
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in names:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is there twice", key.start_mark)
            names.add(key.value)
        return node


def read_configs(args: list[str]) -> list[Any]:
    """Read the configurations of a command line.

    Args:
        args: The command line.

    Returns:
        The content of each, a dictionary; a value that is neither file nor YAML is left to the parser.

    Raises:
        ValueError: If one cannot be read or has another shape, naming the file and what it must hold.
    """
    contents = []
    for value in _config_values(args):
        if not value:
            raise ValueError("--config: needs the name of a file, as in `--config x.yaml`, got nothing.")
        is_file = os.path.isfile(value)
        where = f"--config {value}" if is_file else "--config"
        try:
            content = yaml.load(Path(value).read_text(encoding="utf-8") if is_file else value, _Loader)
            _check_size(content)
        except UnicodeDecodeError:
            raise ValueError(f"{where}: it is not text in UTF-8.") from None
        except OSError as error:
            raise ValueError(f"{where}: it cannot be read: {error.strerror}.") from None
        except RecursionError:
            raise ValueError(f"{where}: it is nested too deeply.") from None
        except (yaml.YAMLError, ValueError, TypeError) as error:
            if is_file or isinstance(error, yaml.constructor.ConstructorError):
                raise ValueError(f"{where}: it is not plain YAML: {_reason(error)}.") from None
            continue
        if is_file or isinstance(content, dict):
            _check_shape(where, content)
            contents.append(content)
    return contents


def _config_values(args: list[str]) -> list[str]:
    values = [b for a, b in pairwise(args) if a in ("-c", "--config")]
    values += [arg.partition("=")[2] for arg in args if arg.startswith("--config=")]
    return [os.path.expanduser(value) for value in values]


def _check_size(content: Any) -> None:
    """Refuse anchors that hold themselves (JSON refuses them too) or stand for too many values."""
    for count, _ in enumerate(json.JSONEncoder(default=str).iterencode(content)):
        if count > 4 * MAX_VALUES:  # with the commas and brackets between them
            raise ValueError(f"its anchors stand for more than {MAX_VALUES} values")


def _reason(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f", in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    problem = ", ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None)))) or str(error)
    return re.sub(r"\s+", " ", problem.partition('in "<unicode string>"')[0]).strip(" .") + where


def _check_shape(where: str, content: Any) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{where}: it must hold keys such as `trainer:`, but holds {shown(content)}.")
    for name in _SECTIONS:
        if name in content and not isinstance(content[name], dict | str):
            raise ValueError(f"{where}: `{name}:` must hold keys of its own, but holds {shown(content[name])}.")
    for name in (*_SECTIONS, "optimizer", "lr_scheduler"):
        _check_classes(f"{where}: {name}", content.get(name))


def _check_classes(where: str, value: Any) -> None:
    """Refuse, at any depth, malformed class configurations, for which the parser has no words."""
    if isinstance(value, dict) and "class_path" in value:
        for key in value:
            if key not in CLASS_KEYS:
                raise ValueError(f"{where}.{key}: there is no such key; beside `class_path` there is `init_args`.")
        if not (isinstance(path := value["class_path"], str) and path):
            raise ValueError(f"{where}.class_path: must be the name or the import path of a class, got {shown(path)}.")
        if not isinstance(arguments := value.get("init_args", {}), dict):
            raise ValueError(f"{where}.init_args: must hold arguments by name, got {shown(arguments)}.")
    parts: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        inner = f"[{name}]" if isinstance(value, list) else "" if name == "init_args" else f".{name}"
        _check_classes(where + inner, part)


def is_named(section: str, args: list[str], contents: list[Any]) -> bool:
    """Test for a section on the command line or in a configuration that it names.

    >>> is_named("model", ["fit", "--model.lr", "0.1"], []), is_named("model", ["fit"], [{"fit": {"model": {}}}])
    (True, True)
    """
    keys = {arg.lstrip("-").partition("=")[0].partition(".")[0] for arg in args if arg.startswith("--")}
    # Below a command's name too: a file may hold several.
    parts = [part for content in contents for part in (content, *content.values()) if isinstance(part, dict)]
    return section in keys or any(section in part for part in parts)
