"""``fedstop doctor``: whether this machine can train, and with what."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_fedstop._cli_parser import SentenceParser
from lightning_fedstop.diagnosis import ROCM_SETTINGS, Diagnosis, diagnose
from lightning_fedstop.records.atomic import atomic_file

SECONDS = 4.0
"""How long the training check of a device takes, kernel search and the last step apart."""

Row = tuple[str, str, str]


def _parser() -> SentenceParser:
    parser = SentenceParser(
        prog="fedstop doctor",
        description="Look at all that training needs, train for a few seconds on each device, and say what is wrong. "
        "The exit code is 0 if this machine can train and 1 if not.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--accelerator", default="auto", metavar="NAME", help="one that has to be there, such as cuda or rocm")
    add("--data_root", metavar="DIR", help="the folder of MedMNIST's files (default: ~/.medmnist)")
    add("--default_root_dir", metavar="DIR", help="the folder that runs are written to (default: the present one)")
    add("--no_training", action="store_true", help="leave out the training check")
    add("--json", metavar="FILE", help="write what was found to a file as well, or to the screen alone if it is `-`")
    return parser


def main(argv: list[str]) -> None:
    """Print what was found.

    Args:
        argv: the arguments after ``fedstop doctor``.

    Raises:
        SystemExit: with code 1, after a sentence for each problem on stderr; with 2 for an error in the arguments.
    """
    args = _parser().parse_args(argv)
    # A file that cannot be written is better refused before a minute of tests.
    if args.json not in (None, "-") and not Path(args.json).absolute().parent.is_dir():
        raise FileNotFoundError(f"--json {args.json}: there is no folder '{Path(args.json).absolute().parent}'.")
    console = Console(highlight=False, markup=False, quiet=args.json == "-", width=None if sys.stdout.isatty() else 120)
    found = diagnose(args.accelerator, args.data_root, args.default_root_dir)
    _print_table(console, rows(found.facts))
    if not args.no_training and "devices" in found.facts:
        _check_training(console, found)
    if args.json is not None:
        _write_json(args.json, found)
    for warning in found.warnings:
        sys.stderr.write(f"fedstop doctor: warning: {warning}\n")
    for problem in found.problems:
        sys.stderr.write(f"fedstop doctor: error: {problem}\n")
    if found.problems:
        raise SystemExit(1)
    console.print("This machine can train.")


def _check_training(console: Console, found: Diagnosis) -> None:
    from lightning_fedstop.training_check import BACKBONE, BATCH_SIZE, SIDE, train_briefly

    console.print(f"Training {BACKBONE} on batches of {BATCH_SIZE} images of {SIDE} px:")
    found.facts["training"] = checks = []
    for device in found.facts["devices"]:
        name = device["device"]
        if device["error"]:
            continue
        console.print(f"  {name}: ", end="")
        sys.stdout.flush()  # what is seen of a device that takes the process down with it
        check: dict[str, Any] = {"device": name, "error": None}
        try:
            index = int(name.partition(":")[2] or 0)
            check |= asdict(train_briefly(device["accelerator"], index, SECONDS))
            console.print(
                f"{check['steps_per_second']:.1f} steps a second, the first took {check['first_step_seconds']:.2f} s"
            )
        except Exception as error:
            check["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(".")
            console.print("failed")
            found.problems.append(f"Training on {name} failed: {check['error']}.")
        checks.append(check)


def rows(facts: dict[str, Any]) -> list[Row]:
    """The facts as lines of a table: topic, name and what is to say."""
    lines: list[Row] = [("Versions", "python", f"{facts['python']} on {facts['platform']}")]
    lines += [("", name, version) for name, version in facts["versions"].items()]
    lines += _machine_rows(facts)
    for number, device in enumerate(facts.get("devices", [])):
        lines.append(("" if number else "Devices", device["device"], _device(device)))
    if [device["device"] for device in facts.get("devices", [])] == ["cpu"]:
        lines.append(("", "GPU", "none is visible"))
    for number, (name, value) in enumerate(facts.get("rocm_settings", {}).items()):
        value = "not set" if value is None else repr(value)
        lines.append(("" if number else "ROCm settings", name, f"{value}: {ROCM_SETTINGS[name]}"))
    lines.append(("Folders", "runs", _folder(facts["default_root_dir"])))
    lines.append(("", "MedMNIST", _folder(facts["data"])))
    lines += [("", "", _archive(archive)) for archive in facts["data"].get("archives", [])]
    return lines


def _machine_rows(facts: dict[str, Any]) -> Iterable[Row]:
    machine = facts["machine"]
    torch = facts.get("torch")
    if torch is not None:
        yield "torch", "built for", torch["build"]
    threads = "" if torch is None else f", {torch['threads']} threads of torch"
    yield "Machine", "cores", f"{machine['usable_cores']} of {machine['cores']} usable{threads}"
    limit = machine["memory_limit"]
    limited = f", this process may have {_size(limit)}" if limit is not None else ""
    yield "", "memory", f"{_size(machine['memory_available'])} of {_size(machine['memory_total'])} available{limited}"


def _device(device: dict[str, Any]) -> str:
    if device["error"]:
        return f"cannot be used: {device['error']}"
    bf16 = {True: "bf16", False: "bf16 emulated", None: "bf16 unknown"}[device["bf16"]]
    memory = ""
    if device["device"] != "cpu" and device["memory_total"] is not None:
        memory = f", {_size(device['memory_free'])} of {_size(device['memory_total'])} free"
    return f"{device['name']}{memory}, {bf16}, accelerator {device['accelerator']}"


def _folder(folder: dict[str, Any]) -> str:
    there = "" if folder["exists"] else ", not there yet"
    access = "writable" if folder["refusal"] is None else f"not writable ({folder['refusal']})"
    return f"{folder['path']}{there}, {access}, {_size(folder['free_bytes'])} free"


def _archive(archive: dict[str, Any]) -> str:
    if archive["error"] is not None:
        return f"{archive['file']}: {archive['error']}"
    sizes = ", ".join(f"{archive[split]} {split}" for split in ("train", "val", "test"))
    return f"{archive['file']}: {archive['width']} x {archive['height']} px, {sizes}"


def _size(count: int | None) -> str:
    """Bytes, readably.

    >>> _size(3 * 2**29), _size(2**40), _size(None)
    ('1.5 GiB', '1024.0 GiB', '?')
    """
    return "?" if count is None else f"{count / 2**30:.1f} GiB"


def _print_table(console: Console, lines: Iterable[Row]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        # As `Text`, because a string's square brackets would be read as markup.
        table.add_row(*map(Text, line))
    console.print(table)


def _write_json(path: str, found: Diagnosis) -> None:
    content = {"can_train": not found.problems, **asdict(found)}
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
