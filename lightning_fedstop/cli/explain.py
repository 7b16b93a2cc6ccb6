"""One sentence for an error message of jsonargparse: key, innermost reason, and what exists instead."""

import argparse
import inspect
import re
from difflib import get_close_matches
from typing import Any, NamedTuple

from lightning_fedstop.cli.names import CLASS_KEYS, NOT_OFFERED, argument_names, class_names, resolved, shown
from lightning_fedstop.utilities.validate import other_package

# Lines that only announce others.
_AROUND = re.compile(
    r"Does not validate|Subtypes:|Errors:|Given value|Subclass types expect|a class path|a dict with"
    r"|Expected a path but"
)
_KEY = re.compile(r'(?:Validation failed: )?Parser key "([^"]+)":\s*(.*)')
_CLASS = re.compile(r"Problem with given class_path '([^']+)':")
_EXPECTED = re.compile(r"Expected an? (?!dot import|import|instantiatable)(.+?)(?:\. Got value: .*)?$")
# The wordings of unknown names, of jsonargparse 4.39 and of later versions: only hints depend on them.
_UNKNOWN_KEY = re.compile(
    r"[Uu]nrecognized arguments: (\S+)|(?:[Oo]ption|[Kk]ey) '([^']+)' is not (?:accepted(?! before)|expected)"
    r"|does not accept (?:option|nested key) '([^']+)'"
)
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (\S+)|Expected an instantiatable class")
_SHOWN = 12


class _Innermost(NamedTuple):
    """The place of the deepest reason in a nested message."""

    keys: list[str]
    class_path: str
    reasons: list[str]
    bases: list[Any]
    value: str | None


def explain(message: str, parser: argparse.ArgumentParser) -> str:
    """Shorten a message of jsonargparse to one sentence, with a hint for unknown names.

    Args:
        message: The message, several lines with one level of nesting for each level of keys.
        parser: Whose keys exist.
    """
    keys, class_path, reasons, bases, value = _innermost(message)
    kinds = [match[1] for reason in reasons if (match := _EXPECTED.match(reason))]
    kinds.sort(key="<class 'NoneType'>".__eq__)  # null last
    others = [reason for reason in reasons if not _EXPECTED.match(reason)]
    others = [reason for reason in others if not reason.startswith("Not a valid subclass")] or others
    short = class_path.rpartition(".")[2] if resolved(class_path) else class_path
    where = "".join(f"{part}: " for part in (".".join(keys), short) if part)
    got = "" if value is None else f", got {shown(value)}"
    if not others or re.search(r"'(int|float|str)'", " ".join(kinds)):  # else these are the other types of a class
        return f"{where}must be {' or '.join(map(_kind, kinds))}{got}."
    reason = others[0].rstrip(".")
    if unknown := _UNKNOWN_KEY.search(reason):
        name = next(filter(None, unknown.groups()))
        return f"{where}{reason}{_key_hint(name, class_path, parser)}"
    if no_class := _UNKNOWN_CLASS.match(reason):
        name = no_class[1] or value or ""
        return f"{where}there is no class '{name}'{_hint(name, class_names(bases))}"
    if re.match("argument of type|'str' object|Not a valid subclass", reason):  # which say nothing to a user
        kind = " or ".join(dict.fromkeys(base.__name__ for base in bases if inspect.isclass(base)))
        reason = f"must be a {kind or 'class'} by name, or with `class_path` and `init_args`"
    elif "does not correspond to a subclass" in reason and inspect.isclass(given := resolved(value or "")):
        got += other_package(given)
    elif class_path or not bases:
        got = ""
    return f"{where}{reason}{got}."


def _innermost(message: str) -> _Innermost:
    """Find the deepest reason, the keys and class above it, and the reasons beside it."""
    lines = [(len(line) - len(line.lstrip(" -")), line.lstrip(" -")) for line in message.splitlines() if line.strip()]
    told = [n for n, (_, text) in enumerate(lines) if not _AROUND.match(text)]
    if not told:
        return _Innermost([], "", [" ".join(message.split())], [], None)
    place = max(told, key=lambda n: lines[n][0])  # the first of the deepest
    depth, text = lines[place]
    keys, class_path, bases = [], "", ""
    if own := _KEY.match(text):
        keys, text = [own[1]], own[2]
    above = depth
    for outer, line in reversed(lines[:place]):
        if line.startswith("Subtypes:") and not bases:
            bases = line
        if outer >= above:
            continue
        above = outer
        if match := _KEY.match(line):
            keys.insert(0, match[1])
        elif not keys and (match := _CLASS.match(line)):
            class_path = match[1]
    reasons = [text, *(lines[n][1] for n in told if n > place and lines[n][0] == depth)]
    if not keys and not class_path:
        reasons = [" ".join(message.split())]
    rest = "\n".join([text, *(line for _, line in lines[place:])])
    value = re.search(r"(?:Given|Got) value: (?:NestedArg\(key='.*?', val=)?'?(.*?)'?\)?$", rest, re.MULTILINE)
    paths = re.findall(r"[\w.]+\.\w+", bases)
    return _Innermost(keys, class_path, reasons, [*map(resolved, paths)], value[1] if value else None)


def _key_hint(name: str, class_path: str, parser: argparse.ArgumentParser) -> str:
    name = name.lstrip("-").partition("=")[0].removesuffix("+")
    if class_path:
        target, first = resolved(class_path), name.partition(".")[0]
        takers = class_names([target], taking=first)
        if target in NOT_OFFERED and takers:
            return f"; name the class that takes '{first}', which is one of {', '.join(takers[:_SHOWN])}."
        return _hint(first, argument_names(target), CLASS_KEYS)
    known = [action.dest for action in parser._actions if action.dest not in (argparse.SUPPRESS, "help")]
    known = [key for key in known if not key.endswith(".help")]
    group = name.rpartition(".")[0]
    siblings = [key for key in known if group and key.startswith(f"{group}.")]
    tops = list(dict.fromkeys(key.partition(".")[0] for key in known))
    return _hint(name, siblings or tops, known)


def _hint(name: str, shown_names: list[str], more: Any = ()) -> str:
    """Name what is close to an unknown name, of all; else list what exists."""
    by_lower = {known.lower(): known for known in (*more, *shown_names)}
    count = 1 if name.lower() in by_lower else 2
    if near := [by_lower[lower] for lower in get_close_matches(name.lower(), by_lower, n=count, cutoff=0.75)]:
        return f"; did you mean {' or '.join(near)}?"
    rest = ", ..." if len(shown_names) > 2 * _SHOWN else ""
    return f"; there are {', '.join(shown_names[: 2 * _SHOWN])}{rest}." if shown_names else "."


def _kind(kind: str) -> str:
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", kind).replace("NoneType", "null").replace("typing.", "")
