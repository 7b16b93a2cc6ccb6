import importlib.util
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(name):
    """An example as a module, ``__main__`` left out."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_drop_in_callback(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    early_stopping = load("drop_in_callback").main()
    printed = capsys.readouterr().out
    assert early_stopping.stopped
    assert f"Stopped after {early_stopping.stopped_epoch + 1} of 200 epochs." in printed
    assert early_stopping.stopping_reason_message in printed
    assert list(tmp_path.iterdir()) == []


def test_federate_your_module(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop = load("federate_your_module").main(default_root_dir=str(tmp_path))
    printed = capsys.readouterr().out
    assert loop.should_stop
    assert loop.summary["stop_round"] < 150
    assert loop.summary["test"]["test_accuracy"] > 0.85
    assert f"Stopped at round {loop.summary['stop_round']} of 150" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["lightning_logs"]
