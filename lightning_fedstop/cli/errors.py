"""One sentence for an error in what the user gave: which key, what is wrong, and what exists.

``explain`` reads the nested messages of jsonargparse, ``sentence_of`` an exception.
"""

import argparse
import ast
import dis
import inspect
import re
from difflib import get_close_matches
from traceback import walk_tb
from types import FrameType
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fedstop.cli.names import misformed, resolved, unknown_argument, unknown_class
from lightning_fedstop.utilities.validate import other_package

# The wordings of jsonargparse 4.39 and of later versions.
_KEY = re.compile(r'Parser key "([^"]+)"')
_UNKNOWN_KEY = re.compile(
    r"(Subcommand|Group) '([\w.]+)' does not accept (?:option|nested key) '([^']+)'"
    r"|^(?:Validation failed: )?Key '([^']+)' is not expected"
)
_UNKNOWN_ARGUMENT = re.compile(
    r"Option '([^']+)' is not accepted|[Uu]nrecognized arguments: --([^=\s]+)|Key '([^']+)' is not expected"
)
_MISSING = re.compile(r'the following arguments are required: (.+)|Key "([^"]+)" is required')
_CLASS_PATH = re.compile(r"Problem with given class_path '([^']+)'")


def explain(message: str, parser: argparse.ArgumentParser) -> str:
    """One sentence for an error message of jsonargparse.

    Args:
        message: The message, several lines with one level of nesting for each level of keys.
        parser: Whose keys exist.
    """
    if match := re.match(r"[Uu]nrecognized arguments: (.*)", message):
        words = match[1].split()
        options = [word for word in words if word.startswith("-")]
        if not options:
            return f"'{words[0]}' is left over: each value needs a key in front, as in `--trainer.max_rounds 10`."
        key = options[0].lstrip("-").partition("=")[0].removesuffix("+")
        return _no_such_key(key, parser) if key else f"'{options[0]}' is left over: there is no such key."
    if match := _UNKNOWN_KEY.search(message):
        prefix = f"{match[2]}." if match[1] == "Group" else ""
        return _no_such_key(prefix + (match[3] or match[4]), parser)
    if match := re.match(r"Option '([\w.]+)' is not accepted before subcommand '(\w+)'", message):
        return f"{match[1]}: the command comes first, as in `fedstop {match[2]} --config x.yaml`."
    if match := re.match(r"(--[\w.]+\.help): Expected a dot import path string: (\S+)", message):
        return f"{match[1]}: there is no class '{match[2]}'."
    if match := re.match(r"ambiguous option: --(\S+) could match ", message):
        return _no_such_key(match[1].partition("=")[0], parser)
    if match := re.match(r"argument (?:-\w/)?(\S+): expected (?:one|at least one) argument", message):
        return f"{match[1].removeprefix('--') if '.' in match[1] else match[1]}: needs a value, but none was given."
    if match := re.match(r"""(?:Parser key "([\w.]+)":\s*)?Unable to load config ['"](.*?)['"]""", message):
        keys = [action.dest.partition(".")[2] for action in parser._actions if action.dest.startswith(f"{match[1]}.")]
        some = ", ".join([key for key in keys if "." not in key][:5])
        return f"{match[1] or '--config'}: must hold keys of its own, such as {some or 'trainer'}, got '{match[2]}'."
    return _nested(message)


def _no_such_key(key: str, parser: argparse.ArgumentParser) -> str:
    known = [action.dest for action in parser._actions if action.dest not in (argparse.SUPPRESS, "help")]
    known = [name for name in known if not name.endswith(".help")]
    near = get_close_matches(key, known, n=3, cutoff=0.75)
    if near:
        return f"{key}: there is no such key; did you mean {' or '.join(near)}?"
    group = key.rpartition(".")[0]
    siblings = [name for name in known if name.startswith(f"{group}.")] if group else []
    tops = list(dict.fromkeys(name.partition(".")[0] for name in known))
    return f"{key}: there is no such key; there are {', '.join(siblings or tops)}."


def _nested(message: str) -> str:
    """A wrong value somewhere below a key: follow the keys down to the first reason."""
    message = _first_branches(message)
    path: list[str] = []
    class_path = ""
    for line in message.splitlines():
        if match := _KEY.search(line):
            path.append(match[1])
        if match := _CLASS_PATH.search(line):
            class_path = match[1]
        where = ".".join(path) or "error"
        if match := _UNKNOWN_ARGUMENT.search(line):
            return f"{where}: {unknown_argument(class_path, match[1] or match[2] or match[3])}"
        if match := _MISSING.search(line):
            names = match[1] or match[2]
            if not class_path:
                return f"{names}: needed, but not given."
            return f"{where}: {class_path.rpartition('.')[2]} needs the argument {names}."
        if match := re.search(r"No module named '([^']+)'", line):
            return f"{where}: '{class_path}' cannot be imported: there is no module '{match[1]}'."
        if match := re.search(r"module '([^']+)' has no attribute '([^']+)'", line):
            return f"{where}: '{class_path}' cannot be imported: the module '{match[1]}' has no '{match[2]}'."
        if match := re.search(r"Import path (\S*).*does not correspond to a subclass of (\w+)", line):
            plain = re.findall(r"Given value: ([\w.]+)$", message, re.MULTILINE) or [match[1]]
            given = resolved(plain[0])
            hint = other_package(given) if inspect.isclass(given) else ""
            return f"{where}: '{plain[0]}' is not a subclass of {match[2]}{hint}."
        if (match := re.search(r"Expected a dot import path string: (\S+)", line)) and not _takes_numbers(message):
            return f"{where}: {_unknown_class(match[1], message)}"
        if "Expected an instantiatable class" in line:
            values = re.findall("Given value: (.*)", _innermost(message))
            return f"{where}: {_unknown_class(values[0], message)}"
        if match := re.search(r"(?:File does not exist|Path is not a file): '(.*)'", line):
            missing = "does not exist" if "exist" in line else "is not a file"
            return f"--{where} {match[1]}: it {missing}."
    inner = _innermost(message)
    given = re.findall(r"(?:Given value|Got value): (.*)", inner)
    kinds = dict.fromkeys(
        re.findall(r"Expected an? (?!path but |dot import path)(.+?)(?:\. Got value.*)?$", inner, re.MULTILINE)
    )
    if re.search("Not a valid subclass of|Unexpected import path format", inner):
        subtypes = inner.rpartition("Subtypes:")[2].partition("\n")[0]
        kinds |= dict.fromkeys(re.findall(r"<class '[\w.]+\.\w+'>", subtypes))
    if path and given and list(kinds) == ["<class 'NoneType'>"]:
        return misformed(".".join(path), _value(given[0])) or (
            f"{'.'.join(path)}: must be a class with `class_path` and `init_args`, or null, got {given[0]}."
        )
    if path and given and kinds:
        value = re.sub(r"NestedArg\(key='[^']*', val=(.*)\)", r"\1", given[0]).strip("'")
        return f"{'.'.join(path)}: must be {' or '.join(sorted(map(_kind, kinds), key='null'.__eq__))}, got '{value}'."
    if path and class_path and (reason := re.search(r"Problem with given class_path '[^']+':\s*(.+)", message)):
        values = [misformed(".".join(path), _value(value)) for value in re.findall("Given value: (.*)", message)]
        if "object has no attribute 'keys'" in reason[1]:
            where = f"{'.'.join(path)}.init_args"
            values.append(f"{where}: must hold arguments by name, as in `init_args: {{seed: 1}}`, or be left out.")
        return next(filter(None, values), f"{'.'.join(path)}: '{class_path}': {reason[1].strip()}.")
    return re.sub(r'^Parser key "([\w.]+)":', r"\1:", _one_line(message)).rstrip(".") + "."


def _takes_numbers(message: str) -> bool:
    """Whether a number would have done where a class was looked for, as for an optimizer's ``lr``."""
    kinds = message.rpartition("Subtypes:")[2].partition("\n")[0]
    return any(f"<class '{kind}'>" in kinds for kind in ("int", "float"))


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None


def _first_branches(message: str) -> str:
    """Of all the types that a value could have been, keep the first that names a class: the others are `null` or lists.

    jsonargparse lists what each of them has against the value, as items of the same depth.
    """
    kept: list[str] = []
    skip_from: int | None = None
    branches: list[int] = []
    for line in message.splitlines():
        depth = len(line) - len(line.lstrip())
        if skip_from is not None and (depth > skip_from or (depth == skip_from and line.lstrip().startswith("- "))):
            continue
        skip_from = None
        branches = [branch for branch in branches if branch <= depth]
        if depth in branches and line.lstrip().startswith("- "):
            skip_from = depth
            continue
        if _CLASS_PATH.search(line):
            branches.append(depth)
        kept.append(line)
    return "\n".join(kept)


def _innermost(message: str) -> str:
    """The lines that belong to the last key, which are those indented below it."""
    lines = message.splitlines()
    last = max((n for n, line in enumerate(lines) if _KEY.search(line)), default=0)
    depth = len(lines[last]) - len(lines[last].lstrip())
    rest = range(last + 1, len(lines))
    end = next((n for n in rest if lines[n].strip() and not lines[n].startswith(" " * (depth + 1))), None)
    return "\n".join(lines[last:end])


def _unknown_class(name: str, message: str) -> str:
    kinds = message.rpartition("Subtypes:")[2].partition("\n")[0]
    return unknown_class(name, [resolved(path) for path in re.findall(r"[\w.]+\.\w+", kinds)])


def _kind(kind: str) -> str:
    name = re.sub(r"<class '([\w.]+)'>", lambda match: match[1].rpartition(".")[2], kind)
    name = re.sub(r"(?:typing\.)?Literal\[(.*)\]", lambda match: match[1].replace(", ", " or "), name)
    return name.replace("NoneType", "null")


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def sentence_of(error: Exception) -> str | None:
    """The sentence to print for an error in what the user gave; ``None`` for any other, which keeps its traceback.

    That is: what model, data, callbacks or loop refuse while they are built, what fails while the data is prepared,
    and what this package or Lightning refuses with a sentence later on.
    """
    while str(error).startswith("Call to compute_fn of link") and isinstance(error.__cause__, Exception):
        error = error.__cause__
    key = getattr(error, "config_key", None)
    is_usual = isinstance(
        error, (ValueError, TypeError, OSError, RuntimeError, ImportError, MisconfigurationException, MemoryError)
    )
    if not is_usual and key is None:
        return None
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    building = not any(frame.f_code.co_name == "_run_subcommand" for frame in frames)
    preparing = any(
        frame.f_code.co_name in ("setup", "prepare_data")
        and isinstance(frame.f_locals.get("self"), LightningDataModule)
        for frame in frames
    )
    if not (building or preparing or _is_refusal(error)):
        return None
    text = _one_line(str(error)) or type(error).__name__
    if not is_usual and not text.startswith(type(error).__name__):
        text = f"{type(error).__name__}: {text}"
    owner = _built_class(frames) if building else None
    prefix = f"{owner}: " if owner and not text.startswith(owner) else ""
    where = f"{key}: " if key and not text.startswith(f"{key}.") else ""
    notes = "".join(f" {_one_line(note)}" for note in getattr(error, "__notes__", []))
    return f"{where}{prefix}{text}{'' if text.endswith(('.', '!', '?')) else '.'}{notes}"


def _is_refusal(error: Exception) -> bool:
    """Whether a ``raise`` of this package or of Lightning's callbacks made it, or Lightning says it is about usage."""
    if isinstance(error, MisconfigurationException):
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    own = ("lightning_fedstop", "lightning.pytorch.callbacks")
    if last is None or not last.tb_frame.f_globals.get("__name__", "").startswith(own):
        return False
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"


def _built_class(frames: list[FrameType]) -> str | None:
    """The class whose ``__init__`` was running: jsonargparse does not say for which one an argument was refused."""
    for frame in frames:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and not isinstance(owner, LightningCLI):
            return type(owner).__name__
    return None
