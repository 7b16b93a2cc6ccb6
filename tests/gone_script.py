"""A fit with two processes of which the first is killed: ``python -m tests.gone_script <root> <when>``.

The second writes its process id to ``<root>/second``; then the first kills itself ``in a launch``, before the two have
met, or ``in a round``, while the second is busy with a client.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback

from tests.helpers import ToyData, ToyModule, make_loop

LONG = 1800.0
"""Seconds for which a process does nothing; the test does not wait for their end."""


def die_after(path):
    while not path.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


class Busy(Callback):
    def __init__(self, path):
        self.path = path

    def on_client_end(self, trainer, *_):
        if trainer.current_epoch == 1:
            if trainer.global_rank == 1:
                write_own_id(self.path)
                time.sleep(LONG)
            die_after(self.path)


def write_own_id(path):
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    root, when = sys.argv[1:]
    path = Path(root) / "second"
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if when == "in a launch" and is_first:
        torch.distributed.init_process_group = lambda *_, **__: time.sleep(LONG)
        threading.Thread(target=die_after, args=(path,), daemon=True).start()
    elif when == "in a launch":
        write_own_id(path)
    callbacks = [Busy(path)] if when == "in a round" else []
    loop = make_loop(root, *callbacks, devices=2, strategy="ddp", clients_per_round=4, max_rounds=4)
    loop.fit(ToyModule(), ToyData())
