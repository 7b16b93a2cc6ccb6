"""A fit with two processes of which one fails: ``python -m tests.failing_script <root> <rank> <hook>``."""

import sys

from lightning.pytorch import Callback

from tests.helpers import ToyData, ToyModule, make_loop


class Fails(Callback):
    """Raises in one hook of the second round, on one process alone."""

    def __init__(self, rank, hook):
        self.rank = rank
        setattr(self, hook, self._fail)

    def _fail(self, trainer, *_):
        if trainer.global_rank == self.rank and trainer.current_epoch == 1:
            raise ValueError(f"no luck on {self.rank}")


if __name__ == "__main__":
    root, rank, hook = sys.argv[1:]
    loop = make_loop(root, Fails(int(rank), hook), devices=2, strategy="ddp", clients_per_round=4, max_rounds=4)
    loop.fit(ToyModule(), ToyData())
