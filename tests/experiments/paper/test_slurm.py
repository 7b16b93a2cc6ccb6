import shutil
import subprocess

import pytest

from experiments.paper import slurm
from experiments.paper.slurm import array_script


@pytest.fixture
def submit(tmp_path):
    """Runs a task of a script with a `fedstop` that only notes its arguments."""
    if shutil.which("bash") is None:
        pytest.skip("the script needs bash")
    program = tmp_path / "bin" / "fedstop"
    program.parent.mkdir()
    program.write_text('#!/bin/bash\nprintf "%s|" "$@" >> said.txt\necho >> said.txt\n[[ "$2" != fails ]]\n')
    program.chmod(0o755)

    def run(script, task=0):
        path = tmp_path / "job.sh"
        path.write_text(script)
        (tmp_path / "said.txt").unlink(missing_ok=True)
        search = f"{program.parent}:/usr/bin:/bin"
        environment = {"PATH": search, "SLURM_ARRAY_TASK_ID": str(task)}
        done = subprocess.run(["bash", str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert not done.stderr
        said = tmp_path / "said.txt"
        return done.returncode, said.read_text().splitlines() if said.exists() else []

    return run


def test_a_task_trains_its_run(submit):
    script = array_script("paper", [("runs/a", ["fit", "a b"]), ("runs/b", ["fit", "$HOME"])], {})
    assert submit(script, 0) == (0, ["fit|a b|"])
    assert submit(script, 1) == (0, ["fit|$HOME|"])


def test_a_run_with_a_checkpoint_goes_on_and_a_finished_one_is_left_alone(submit, tmp_path):
    script = array_script("paper", [("my runs/a", ["fit"])], {})
    version = tmp_path / "my runs" / "a" / "lightning_logs" / "version_0"
    (version / "checkpoints").mkdir(parents=True)
    assert submit(script) == (0, ["fit|"])
    (version / "checkpoints" / "last.ckpt").touch()
    assert submit(script) == (0, ["fit|--ckpt_path|last|"])
    (version / "summary.json").touch()
    assert submit(script) == (0, [])


def test_more_runs_than_tasks_share_them_and_one_that_fails_ends_no_other(submit, monkeypatch):
    monkeypatch.setattr(slurm, "MAX_TASKS", 2)
    jobs = [(f"runs/{n}", ["fit", "fails" if n == 0 else str(n)]) for n in range(5)]
    script = array_script("paper", jobs, {})
    assert "#SBATCH --array=0-1\n" in script
    assert submit(script, 0) == (1, ["fit|fails|", "fit|2|", "fit|4|"])
    assert submit(script, 1) == (0, ["fit|1|", "fit|3|"])


def test_the_header_takes_the_users_options():
    script = array_script(
        "paper", [("a", [])], {"partition": "mi300x", "gres": "", "time": "01:00:00"}, "module load x", ["hello"]
    )
    header = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --partition=mi300x" in header
    assert "#SBATCH --time=01:00:00" in header
    assert "#SBATCH --requeue" in header
    assert "#SBATCH --job-name=paper" in header
    assert not any("gres" in line for line in header)
    assert "\nmodule load x\n" in script
    assert "\n# hello\n" in script
    assert script.startswith("#!/bin/bash\n#SBATCH")


def test_no_run_is_no_job():
    with pytest.raises(ValueError, match="no run left"):
        array_script("paper", [], {})
