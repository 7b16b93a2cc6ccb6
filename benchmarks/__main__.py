"""``python -m benchmarks COMMAND [options]``."""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

COMMANDS = {
    "round": "ours against a bare PyTorch loop that does the same work",
    "memory": "peak memory of a whole process against the number of clients",
    "criterion": "the stop decision as a share of a round",
    "norm": "exact norms of long vectors against plain ones",
    "scaling": "several processes, and several threads of one, against one client after the other",
    "methods": "all ten methods relative to FedAvg",
    "steps": "local steps: eager, compiled, bf16, channels last, matrix products",
}


def main(args: list[str] | None = None) -> None:
    """Run one benchmark, print its table and write its JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", metavar="FILE", help="write the figures; - is standard output")
        command.add_argument("--rounds", type=int, default=5, help="rounds measured of each, after one to warm up")
        import_module(f"benchmarks.{name}").add_arguments(command)
    options = parser.parse_args(args)
    result = import_module(f"benchmarks.{options.command}").run(options)
    if options.json:
        text = json.dumps(result, indent=2) + "\n"
        sys.stdout.write(text) if options.json == "-" else Path(options.json).write_text(text)


if __name__ == "__main__":
    main()
