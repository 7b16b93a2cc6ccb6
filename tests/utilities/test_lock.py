import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fedstop.utilities.lock import LOCK_FILE, RunLock, is_live, refuse_live
from tests.helpers import fit, make_loop

ROOT = Path(__file__).parents[2]

OTHER = """
import sys
sys.path.insert(0, {root!r})
import importlib.util
spec = importlib.util.spec_from_file_location("lock", {file!r})
lock = importlib.util.module_from_spec(spec); spec.loader.exec_module(lock)
mine = lock.RunLock({folder!r}); mine.acquire(); print("held", flush=True); sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds a folder."""
    file = str(ROOT / "lightning_fedstop/utilities/lock.py")
    code = OTHER.format(root=str(ROOT), file=file, folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_live_process_blocks_and_one_that_was_killed_does_not(tmp_path, other):
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "checkpoints" / "last.ckpt"
    assert is_live(tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"last\.ckpt' belongs to a run that another process is still training"):
            refuse_live(path)
    other.kill()
    other.wait()
    assert (tmp_path / LOCK_FILE).exists()
    assert not is_live(tmp_path)
    refuse_live(path)


def test_ones_own_lock_does_not_block_and_goes(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.acquire()
    assert not is_live(tmp_path)
    assert (tmp_path / LOCK_FILE).exists()
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"process 1 on elsewhere", b"\xff\xfe"])
def test_a_file_left_behind_does_not_block(tmp_path, content):
    (tmp_path / LOCK_FILE).write_bytes(content)
    assert not is_live(tmp_path)


def test_a_run_marks_its_folder_while_it_lasts(tmp_path):
    seen = []

    class Looks(__import__("lightning").pytorch.Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.append(os.listdir(trainer.log_dir))

    loop, _ = fit(tmp_path, Looks(), max_rounds=1)
    assert LOCK_FILE in seen[0]
    assert LOCK_FILE not in os.listdir(loop.log_dir)


def test_a_run_of_a_live_process_is_not_continued_but_may_be_looked_at(tmp_path):
    loop, module = fit(tmp_path, max_rounds=1)
    path = f"{loop.log_dir}/checkpoints/last.ckpt"
    file = str(ROOT / "lightning_fedstop/utilities/lock.py")
    code = OTHER.format(root=str(ROOT), file=file, folder=loop.log_dir)
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="still training"):
            fit(tmp_path, max_rounds=2, ckpt_path=path)
        assert sorted(os.listdir(tmp_path / "lightning_logs")) == ["version_0"]
        make_loop(tmp_path).test(module, loop.datamodule, ckpt_path=path, verbose=False)
    finally:
        process.kill()
        process.communicate()
    assert fit(tmp_path, max_rounds=2, ckpt_path=path)[0].current_epoch == 2
