"""The files around the package: what they say of it holds."""

from pathlib import Path

import pytest
import yaml

from lightning_fedstop import __version__

ROOT = Path(__file__).parents[1]
YAML_FILES = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_it_is_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_the_citation_names_this_version():
    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == __version__


def test_the_matrix_covers_the_claimed_python_versions():
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    tested = {*jobs["matrix"]["strategy"]["matrix"]["python"], jobs["checks"]["steps"][1]["with"]["python-version"]}
    classifiers = (ROOT / "pyproject.toml").read_text().split("classifiers = [")[1].split("]")[0]
    claimed = {line.split(":: ")[-1].strip('", ') for line in classifiers.splitlines() if "Python :: 3." in line}
    assert tested == claimed


def test_tests_install_what_they_need():
    extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    assert '"lightning-fedstop[all]"' in extras.split("test = [")[1].split("]\n")[0] + "]"
