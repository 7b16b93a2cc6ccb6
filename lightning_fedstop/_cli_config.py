"""Looks at the files that ``--config`` names before they are parsed, so that a refusal can name the file."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

_SECTIONS = ("trainer", "model", "data")


class _Loader(yaml.SafeLoader):  # type: ignore[misc,unused-ignore]
    """Refuses a key that is given twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        names = [key.value for key in keys]
        for number, key in enumerate(keys):
            if key.value in names[:number]:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is there twice", key.start_mark)
        return super().construct_mapping(node, deep)


def check_configs(args: list[str]) -> None:
    """Refuse a configuration file that cannot be read, or of the wrong shape.

    Args:
        args: the command line.

    Raises:
        ValueError: naming the file and what it must hold.
    """
    values = [b for a, b in pairwise(args) if a in ("-c", "--config")]
    values += [arg.partition("=")[2] for arg in args if arg.startswith("--config=")]
    for value in values:
        if Path(value).is_file():
            _check(f"--config {value}", _read(value))


def _read(path: str) -> Any:
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except UnicodeDecodeError:
        raise ValueError(f"--config {path}: it is not text in UTF-8.") from None
    except OSError as error:
        raise ValueError(f"--config {path}: it cannot be read: {error.strerror}.") from None
    except yaml.YAMLError as error:
        text = re.sub(r"\s+", " ", str(error)).replace('in "<unicode string>", ', "").strip()
        raise ValueError(f"--config {path}: it is not YAML: {text}.") from None


def _check(where: str, content: Any) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{where}: it must hold keys such as `trainer:`, but holds {_short(content)}.")
    for name in _SECTIONS:
        if name in content and not isinstance(content[name], dict | str):
            raise ValueError(f"{where}: `{name}:` must hold keys of its own, but holds {_short(content[name])}.")


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
