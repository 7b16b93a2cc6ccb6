"""The ``fedstop`` command: ``main`` picks the subcommand before anything heavy is imported."""

import os
import sys
from difflib import get_close_matches
from pkgutil import resolve_name

from lightning_fedstop.__about__ import __version__

TRAINING_COMMANDS = {
    "fit": "train a federation until it stops",
    "validate": "evaluate a model on the validation data",
    "test": "evaluate a model on the test data",
}
# name -> (module:function taking the remaining arguments, one line of help). A command that does not train is added
# here; nothing but its own module is imported for it.
OTHER_COMMANDS = {
    "partition": ("lightning_fedstop.cli.partition:main", "print and draw how the clients share the training data"),
    "replay": ("lightning_fedstop.cli.replay:main", "print where each stopping rule would have ended recorded runs"),
    "report": ("lightning_fedstop.cli.report:main", "write a page with figures and tables on recorded runs"),
    "doctor": ("lightning_fedstop.cli.doctor:main", "say whether this machine can train, and with what"),
}

# What is left of a command that was interrupted.
KEPT = {
    "fit": "; finished rounds are kept",
}


def main(args: list[str] | None = None) -> None:
    """Run one ``fedstop`` command.

    Args:
        args: The command and its arguments; those of the process by default. ``--debug`` anywhere among them adds the
            traceback to an error that is otherwise one sentence.

    Raises:
        SystemExit: With code 2 for an error in the arguments, the configuration or the data, after one sentence on
            stderr; with code 0 after ``--help`` and the like; with 130 after Ctrl-C. An error within training is raised
            as it is.
    """
    given = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in given
    argv = [arg for arg in given if arg != "--debug"]
    # The console script, unlike `python -m`, does not look for a user's own modules in the present directory. Last, so
    # that a file there cannot hide an installed module.
    if not {"", os.getcwd()}.intersection(sys.path):
        sys.path.append(os.getcwd())
    # Lightning's command line calls some methods of jsonargparse by their former names.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    command = argv[0] if argv else "--help"
    if command in ("-h", "--help", "help"):
        print(_usage())
    elif command in ("--version", "version"):
        print(f"fedstop {__version__}")
    elif command in OTHER_COMMANDS:
        _guarded(OTHER_COMMANDS[command][0], argv[1:], f"fedstop {command}", debug)
    elif command in TRAINING_COMMANDS or command.startswith("-"):
        prog = f"fedstop {command}".partition(" -")[0]
        _guarded("lightning_fedstop.cli.fit:FedStopCLI", argv, prog, debug)
    else:
        known = [*TRAINING_COMMANDS, *OTHER_COMMANDS]
        near = get_close_matches(command, known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        sys.stderr.write(f"fedstop: error: there is no command '{command}'{hint} There are {', '.join(known)}.\n")
        raise SystemExit(2)


def _guarded(path: str, argv: list[str], prog: str, debug: bool) -> None:
    """Run a command; an error in what the user gave ends it with one sentence."""
    command = prog.rpartition(" ")[2]
    try:
        resolve_name(path)(argv)
    except KeyboardInterrupt as error:
        if debug:
            _print_traceback(error)
        sys.stderr.write(f"{prog}: interrupted{KEPT.get(command, '')}.\n")
        raise SystemExit(130) from error
    except SystemExit as error:
        if hasattr(error, "signum") and command != "fit":  # where the loop has said it
            sys.stderr.write(f"{prog}: terminated{KEPT.get(command, '')}.\n")
        if debug and error.__cause__ is not None:
            _print_traceback(error.__cause__)
        raise
    except Exception as error:
        from lightning_fedstop.cli.errors import user_sentence

        sentence = user_sentence(error)
        if sentence is None:
            raise
        if debug:
            _print_traceback(error)
        sys.stderr.write(f"{prog}: error: {sentence}\n")
        raise SystemExit(2) from error


def _print_traceback(error: BaseException) -> None:
    import traceback

    traceback.print_exception(error)


def _usage() -> str:
    commands = {**TRAINING_COMMANDS, **{name: line for name, (_, line) in OTHER_COMMANDS.items()}}
    width = max(map(len, commands))
    return "\n".join(
        [
            "usage: fedstop COMMAND [--config FILE ...] [--KEY VALUE ...]",
            "",
            "Federated learning that stops by itself.",
            "",
            "commands:",
            *(f"  {name:<{width}}  {line}" for name, line in commands.items()),
            "",
            "`fedstop COMMAND --help` lists the keys, `--print_config` prints the whole configuration, `--version` the",
            "version, and `--debug` adds the traceback to an error.",
        ]
    )
