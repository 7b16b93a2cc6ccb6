"""The argument parser of commands that do not train."""

import argparse
import sys
from typing import NoReturn


class SentenceParser(argparse.ArgumentParser):
    """Says in one sentence what is wrong, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 after one sentence."""
        sys.stderr.write(f"{self.prog}: error: {message.rstrip('.')}; see `{self.prog} --help`.\n")
        raise SystemExit(2)
