"""The ways of computing a step are what a user can switch on."""

import inspect
import json

import pytest

from benchmarks.__main__ import main
from benchmarks.steps import WAYS
from lightning_fedstop.models import ImageClassifier


def test_each_way_is_a_ratio_to_the_first(tmp_path):
    sizes = ["--backbone", "test_vit", "--size", "160", "--batch_size", "2", "--rounds", "1"]
    main(["steps", *sizes, "--ways", "timm", "default", "channels_last", "--json", str(tmp_path / "x.json")])
    result = json.loads((tmp_path / "x.json").read_text())
    assert list(result) == ["timm", "default", "channels_last"]
    assert result["timm"]["ratio"] == result["timm"]["cpu_ratio"] == 1
    for figures in result.values():
        assert figures["ratio"] == pytest.approx(figures["median"] / result["timm"]["median"])
        assert len(figures["seconds"]) == len(figures["cpu_seconds"]) == 1


def test_ways_are_switches_of_the_module():
    known = inspect.signature(ImageClassifier).parameters
    assert {name for switches in WAYS.values() for name in switches} <= {*known, "bf16", "compiled"}
