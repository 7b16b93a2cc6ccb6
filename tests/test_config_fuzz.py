"""Whatever is done to a configuration, the command line answers in one sentence or accepts it, without a traceback."""

import copy
import os
import random
import shutil

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_fedstop.cli.main import main
from lightning_fedstop.loop.reporting import Reporter
from tests.cli_tools import ROOT

CONFIGS = ROOT / "configs"
PAPER = "../experiments/paper/configs"
QUICKSTART = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())
VALUES = [
    None,
    True,
    -1,
    0,
    3,
    1e400,
    0.5,
    "",
    "x",
    "null",
    "FedAvg",
    "os.system",
    [],
    [None],
    {},
    {"a": 1},
    "ä\t\n",
    10**30,
]


def places(value, path=()):
    """All keys of a configuration, as paths."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield (*path, name)
        yield from places(part, (*path, name))


def holder_of(config, path):
    for name in path[:-1]:
        config = config[name]
    return config


def drop(config, path, draw):
    del holder_of(config, path)[path[-1]]


def misspell(config, path, draw):
    owner, name = holder_of(config, path), path[-1]
    if isinstance(owner, dict) and len(name) > 1:
        place = draw.randrange(len(name))
        owner[
            draw.choice([name[:place] + name[place + 1 :], name + name[-1], name.upper(), name[::-1], f"{name}."])
        ] = owner.pop(name)


def retype(config, path, draw):
    holder_of(config, path)[path[-1]] = copy.deepcopy(draw.choice(VALUES))


def nest(config, path, draw):
    owner, name = holder_of(config, path), path[-1]
    inner = owner[name]
    owner[name] = draw.choice([{name: inner}, [inner], {"init_args": inner}, {"class_path": inner}, {1: inner}])


def move(config, path, draw):
    value = holder_of(config, path).pop(path[-1])
    target = draw.choice([(), *places(config)])
    owner = holder_of(config, (*target, None))
    if isinstance(owner, dict):
        owner[path[-1]] = value


def outcome(capsys, args):
    """Exit code and what was said."""
    capsys.readouterr()
    try:
        main(args)
    except SystemExit as exit:
        return exit.code, capsys.readouterr()
    return 0, capsys.readouterr()


def check_said(code, said, text):
    assert code in (0, 2), text
    assert "Traceback" not in said.err
    if code == 2:
        lines = [line for line in said.err.splitlines() if line.startswith("fedstop") and ": note: " not in line]
        assert len(lines) == 1, (text, said.err)
        assert lines[0].startswith("fedstop fit: error: "), (text, lines[0])
        assert lines[0].endswith((".", "?", "!")), (text, lines[0])


def check(capsys, text, *more):
    check_said(*outcome(capsys, ["fit", "--config", "x.yaml", *more]), text)


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def names(folder):
    return sorted(f"{folder}/{path.name}" for path in (CONFIGS / folder).glob("*.yaml"))


SETS = ["bloodmnist.yaml", "dermamnist.yaml", "pathmnist.yaml"]


def composed(draw):
    """Shipped configurations that go together, as a user composes them."""
    if draw.random() < 0.4:
        first = draw.choice(["quickstart.yaml", *SETS])
        overlays = [draw.choice(names(folder)) for folder in ("method", "skew", "accelerator")]
        return [first, *draw.sample(overlays, draw.randrange(3))]
    form = draw.choice(["method", "released_code"])
    method = draw.choice([name for name in names(f"{PAPER}/{form}") if "form" not in name])
    chosen = [f"{PAPER}/base.yaml", draw.choice(names(f"{PAPER}/data")), draw.choice(names(f"{PAPER}/skew")), method]
    chosen += [f"{PAPER}/released_code/form.yaml"] * (form == "released_code")
    scale = "tiny" if "digits" in chosen[1] else draw.choice(["tiny", "small", None])
    return chosen + [f"{PAPER}/scale/{scale}.yaml"] * (scale is not None)


def mutated(root, draw, times):
    """Writes such configurations with changes in some of them; gives the arguments and what was written."""
    chosen = composed(draw)
    contents = [yaml.safe_load((CONFIGS / name).read_text()) for name in chosen]
    for _ in range(times):
        config = draw.choice(contents)
        paths = [path for path in places(config) if path[-1] != ""]
        if paths:
            draw.choice([drop, misspell, retype, nest, move])(config, draw.choice(paths), draw)
    text, args = str(chosen), []
    for number, content in enumerate(contents):
        written = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        (root / f"x{number}.yaml").write_text(written, encoding="utf-8")
        text += f"\n--- {chosen[number]}\n{written}"
        args += ["--config", f"x{number}.yaml"]
    return chosen, args, text


TIMES = int(os.environ.get("FUZZ_TIMES", "1"))  # for a longer hunt
allowed = settings(
    max_examples=16 * TIMES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


@allowed
@given(seed=st.integers(0, 2**32), times=st.integers(0, 3))
def test_mutations_of_all_that_is_shipped(root, capsys, seed, times):
    _, args, text = mutated(root, random.Random(seed), times)
    before = sorted(root.iterdir())
    check_said(*(told := outcome(capsys, ["fit", *args, "--print_config"])), text)
    assert times or told[0] == 0, text
    assert sorted(root.iterdir()) == before


class Started(Exception):
    """Everything was accepted, and the first round would begin."""


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Files in the layout of MedMNIST's, small ones."""
    folder, draw = tmp_path_factory.mktemp("medmnist"), np.random.default_rng(0)
    for name, classes in (("bloodmnist", 8), ("dermamnist", 7), ("pathmnist", 9)):
        for size, suffix in ((28, ""), (64, "_64")):
            arrays = {}
            for split, count in (("train", 400), ("val", 20), ("test", 20)):
                arrays[f"{split}_images"] = draw.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
                arrays[f"{split}_labels"] = np.arange(count, dtype=np.uint8)[:, None] % classes
            np.savez(folder / f"{name}{suffix}.npz", **arrays)
    return folder


@pytest.mark.slow
@settings(allowed, max_examples=10 * TIMES)
@given(seed=st.integers(0, 2**32), times=st.integers(0, 2))
def test_mutations_of_all_that_is_shipped_as_far_as_the_first_round(root, archives, capsys, seed, times):
    """A fit that starts, or a sentence and nothing left behind. Nothing is fetched, and the network is a small one."""
    chosen, args, text = mutated(root, random.Random(seed), times)
    last = ["--model.pretrained=false", "--model.backbone=test_vit", "--trainer.enable_progress_bar=false"]
    last += ["--model.matmul_layers=false"]  # which needs a ConvNeXt
    if not {"quickstart.yaml", f"{PAPER}/data/digits.yaml"}.intersection(chosen):
        last += [f"--data.root={archives}", "--data.download=false", "--data.num_clients=12"]
    before = sorted(root.iterdir())

    def start(reporter):
        raise Started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "log_hyperparameters", start)
        try:
            told = outcome(capsys, ["fit", *args, *last])
        except Started:
            for path in set(root.iterdir()) - set(before):
                shutil.rmtree(path)
            return
    check_said(*told, text)
    assert told[0] == 2, text
    assert times or "accelerator" in told[1].err, (text, told[1].err)
    assert sorted(root.iterdir()) == before, text


@settings(allowed, max_examples=8 * TIMES)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40) | st.binary(max_size=40))
def test_anything_as_a_file(root, capsys, text):
    (root / "x.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    check(capsys, text, "--print_config")


KEYS = [
    "trainer",
    "trainer.max_rounds",
    "trainer.method",
    "trainer.callbacks",
    "data",
    "data.skew",
    "model",
    "optimizer",
]


@settings(allowed, max_examples=8 * TIMES)
@given(
    key=st.sampled_from([*KEYS, *(f"{key}.class_path" for key in KEYS), *(f"{key}.init_args" for key in KEYS)]),
    value=st.sampled_from(
        ["", "x", "3", "-1", "null", "[", "{a: 1}", "[1]", "os.system", ".", "a.b", "{class_path: null}"]
    ),
    plus=st.booleans(),
)
def test_anything_on_the_command_line(root, capsys, key, value, plus):
    (root / "x.yaml").write_text(yaml.safe_dump(QUICKSTART))
    check(capsys, (key, value), f"--{key}{'+' * plus}={value}", "--print_config")


@settings(allowed, max_examples=4 * TIMES)
@given(seed=st.integers(0, 2**32))
def test_mutations_that_are_built(root, capsys, seed):
    """Values out of range are refused where the classes are built, before anything is trained or written."""
    draw, config = random.Random(seed), copy.deepcopy(QUICKSTART)
    numbers = [path for path in places(config) if isinstance(holder_of(config, path)[path[-1]], int | float)]
    path = draw.choice(numbers)
    holder_of(config, path)[path[-1]] = -1
    (root / "x.yaml").write_text(yaml.safe_dump(config))
    code, said = outcome(capsys, ["fit", "--config", "x.yaml"])
    assert code == 2, path
    assert ".".join(str(part) for part in path if part != "init_args").split(".")[0] in said.err
    assert not (root / "lightning_logs").exists()
