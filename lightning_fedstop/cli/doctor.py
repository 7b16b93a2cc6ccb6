"""``fedstop doctor``: the facts on this machine, and a dry run on each of its devices."""

import json
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_fedstop.cli import diagnosis
from lightning_fedstop.cli.diagnosis import ROCM_SETTINGS, Diagnosis, diagnose
from lightning_fedstop.cli.parser import SentenceParser
from lightning_fedstop.utilities.files import atomic_file
from lightning_fedstop.utilities.paths import local_path


def _parser() -> SentenceParser:
    parser = SentenceParser(
        prog="fedstop doctor",
        description="Look at all that training needs, train one batch on each device, and say what is wrong. The exit "
        "code is 0 if this machine can train and 1 if not.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--accelerator", default="auto", metavar="NAME", help="one that has to be there, such as cuda or rocm")
    add("--data_root", metavar="DIR", help="the folder of MedMNIST's files (default: ~/.medmnist)")
    add("--default_root_dir", metavar="DIR", help="the folder that runs are written to (default: the present one)")
    add("--no_training", action="store_true", help="leave out the dry runs")
    add("--json", metavar="FILE", help="write the facts to a file as well, or to the screen alone if it is `-`")
    return parser


def main(argv: list[str]) -> None:
    """Print the facts, train one batch on each device, and print what is wrong.

    Args:
        argv: The arguments after ``fedstop doctor``.

    Raises:
        SystemExit: With code 1, after a sentence for each problem on stderr; with 2 for an error in the arguments.
    """
    args = _parser().parse_args(argv)
    # A file that cannot be written is better refused before the dry runs.
    if args.json not in (None, "-") and not (parent := local_path(args.json, "--json").absolute().parent).is_dir():
        raise FileNotFoundError(f"--json {args.json}: there is no folder '{parent}'.")
    console = Console(highlight=False, markup=False, quiet=args.json == "-", width=None if sys.stdout.isatty() else 120)
    found = diagnose(args.accelerator, args.data_root, args.default_root_dir)
    console.print(_table(found.facts))
    if not args.no_training:
        _try_devices(console, found)
    if args.json is not None:
        _write_json(args.json, found)
    for warning in found.warnings:
        sys.stderr.write(f"fedstop doctor: warning: {warning}\n")
    for problem in found.problems:
        sys.stderr.write(f"fedstop doctor: error: {problem}\n")
    if found.problems:
        raise SystemExit(1)
    console.print("This machine can train.")


def _try_devices(console: Console, found: Diagnosis) -> None:
    for device in found.facts.get("devices", []):
        name = device["device"]
        if device["error"]:
            continue
        console.print(f"Dry run on {name}: ", end="")
        sys.stdout.flush()  # what is seen of a device that takes the process down with it
        try:
            device["seconds"] = diagnosis.dry_run(device["accelerator"], int(name.partition(":")[2] or 0))
            console.print(f"one batch in {device['seconds']:.1f} s")
        except Exception as error:
            device["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(".")
            console.print("failed")
            found.problems.append(f"Training on {name} failed: {device['error']}.")


def _table(facts: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    settings = {
        name: f"{'not set' if value is None else repr(value)}: {ROCM_SETTINGS[name]}"
        for name, value in facts.get("rocm_settings", {}).items()
    }
    devices = {device["device"]: _device(device) for device in facts.get("devices", [])}
    devices |= {"GPU": "none is visible"} if list(devices) == ["cpu"] else {}
    folders = {"runs": _folder(facts["runs"]), "MedMNIST": _folder(facts["data"]), **facts.get("archives", {})}
    _add_topic(table, "Versions", facts["versions"])
    _add_topic(table, "Machine", facts.get("machine", {}))
    _add_topic(table, "Devices", devices)
    _add_topic(table, "ROCm settings", settings)
    _add_topic(table, "Folders", folders)
    return table


def _add_topic(table: Table, topic: str, lines: dict[str, Any]) -> None:
    for number, (name, value) in enumerate(lines.items()):
        # As `Text`, because a string's square brackets would be read as markup.
        table.add_row(*map(Text, ("" if number else topic, name, str(value))))


def _device(device: dict[str, Any]) -> str:
    if device["error"]:
        return f"cannot be used: {device['error']}"
    free = "" if device["memory_free"] is None else f", {device['memory_free'] / 2**30:.1f} GiB free"
    return f"{device['name']}{free}, accelerator {device['accelerator']}"


def _folder(folder: dict[str, Any]) -> str:
    there = "" if folder["exists"] else ", not there yet"
    access = "writable" if folder["refusal"] is None else f"not writable ({folder['refusal']})"
    return f"{folder['path']}{there}, {access}, {folder['free_bytes'] / 2**30:.1f} GiB free"


def _write_json(path: str, found: Diagnosis) -> None:
    text = json.dumps({"can_train": not found.problems, **asdict(found)}, indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    with atomic_file(local_path(path, "--json")) as temporary:
        temporary.write_text(text, encoding="utf-8")
