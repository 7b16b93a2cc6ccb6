"""What happens in days, in a minute: thousands of rounds, several runs in one process."""

import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from lightning_fedstop.methods import SCAFFOLD
from lightning_fedstop.records.run_record import read_rounds
from lightning_fedstop.stopping import TaskVectorEarlyStopping
from tests.helpers import ToyData, ToyModule, fit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc of this process"),
]
ROUNDS = 2000
WARM_UP = 400
MEBIBYTE = 2**20


def resident():
    """Resident memory of this process now, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files():
    return len(os.listdir("/proc/self/fd"))


class Watch(Callback):
    """Notes memory and open files after some rounds."""

    def __init__(self):
        self.seen = {}

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch in (WARM_UP, ROUNDS - 1):
            gc.collect()
            self.seen[trainer.current_epoch] = resident(), open_files()


def test_memory_and_open_files_stay_flat_over_2000_rounds(tmp_path):
    watch = Watch()
    rule = TaskVectorEarlyStopping(1e-9, 10, observe_only=True, average="saturation")
    loop, _ = fit(
        tmp_path, watch, rule, method=SCAFFOLD(), data=ToyData((4, 4, 4)), max_rounds=ROUNDS, check_val_every_n_round=50
    )
    (memory, files), (memory_after, files_after) = watch.seen[WARM_UP], watch.seen[ROUNDS - 1]
    assert memory_after - memory < 20 * MEBIBYTE
    assert files_after == files
    rows = read_rounds(Path(loop.log_dir) / "metrics.csv")
    assert [int(row["round"]) for row in rows] == list(range(1, ROUNDS + 1))


def test_three_runs_in_one_process_leave_nothing_behind(tmp_path):
    left, before = [], None
    for number in range(3):
        loop, module = fit(tmp_path / str(number), module=ToyModule(), method=SCAFFOLD())
        left.append((weakref.ref(loop), weakref.ref(module)))
        module.trainer = None
        del loop, module
        gc.collect()
        counts = open_files(), threading.active_count()
        assert before in (None, counts)
        before = counts
    assert all(reference() is None for pair in left for reference in pair)
