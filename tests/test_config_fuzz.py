"""Whatever is done to a configuration, the command line answers in one sentence or accepts it, without a traceback."""

import copy
import os
import random

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_fedstop.cli import main
from tests.cli_tools import ROOT

QUICKSTART = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
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


def check(capsys, text, *more):
    code, said = outcome(capsys, ["fit", "--config", "x.yaml", *more])
    assert code in (0, 2), text
    assert "Traceback" not in said.err
    if code == 2:
        lines = [line for line in said.err.splitlines() if line.startswith("fedstop")]
        assert len(lines) == 1, (text, said.err)
        assert lines[0].startswith("fedstop fit: error: ")
        assert lines[0].endswith((".", "?", "!")), lines[0]


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


TIMES = int(os.environ.get("FUZZ_TIMES", "1"))  # for a longer hunt
allowed = settings(
    max_examples=20 * TIMES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


@allowed
@given(seed=st.integers(0, 2**32), times=st.integers(1, 3))
def test_mutations_of_the_quickstart(root, capsys, seed, times):
    draw, config = random.Random(seed), copy.deepcopy(QUICKSTART)
    for _ in range(times):
        paths = [path for path in places(config) if path[-1] != ""]
        if paths:
            draw.choice([drop, misspell, retype, nest, move])(config, draw.choice(paths), draw)
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    (root / "x.yaml").write_text(text, encoding="utf-8")
    check(capsys, text, "--print_config")


@settings(allowed, max_examples=12 * TIMES)
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


@settings(allowed, max_examples=12 * TIMES)
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
