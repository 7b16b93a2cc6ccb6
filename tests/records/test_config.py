from pathlib import Path

import pytest
import yaml

from lightning_fedstop.data import DirichletSkew
from lightning_fedstop.methods import FedProx
from lightning_fedstop.records.config import write_config
from tests.helpers import ToyData, ToyModule, fit


def test_a_run_built_in_python_describes_itself(tmp_path):
    loop, _ = fit(tmp_path, method=FedProx(0.5), seed=3)
    config = yaml.safe_load((Path(loop.log_dir) / "config.yaml").read_text())
    assert config["trainer"]["max_rounds"] == 3
    assert config["trainer"]["seed"] == 3
    assert config["trainer"]["method"]["class_path"] == "lightning_fedstop.methods.fedprox.FedProx"
    assert config["trainer"]["default_root_dir"] == str(tmp_path)
    assert config["model"] == {"class_path": "tests.helpers.ToyModule", "init_args": {"lr": 0.1}}
    assert config["data"]["class_path"] == "tests.helpers.ToyData"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (Path("a/b"), "a/b"),
        ((1, 2.5, None), [1, 2.5, None]),
        ({"x": {1}}, {"x": [1]}),
        (
            DirichletSkew(0.5),
            {"class_path": "lightning_fedstop.data.skew.DirichletSkew", "init_args": {"concentration": 0.5}},
        ),
        (object(), {"class_path": "builtins.object"}),
    ],
)
def test_values_become_plain(tmp_path, value, written):
    write_config(tmp_path / "config.yaml", {"value": value}, ToyModule(), ToyData())
    got = yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["value"]
    if isinstance(written, dict) and "init_args" in written:
        assert written["init_args"].items() <= got.pop("init_args").items()
        written = {"class_path": written["class_path"]}
    assert got == written


def test_what_the_command_line_wrote_stays(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("mine: 1\n")
    write_config(path, {}, ToyModule(), ToyData())
    assert path.read_text() == "mine: 1\n"
