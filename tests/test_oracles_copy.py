"""The committed oracles are those of the specification, where it lies beside the project."""

import json

import pytest

from tests.helpers import SHARED
from tests.oracles import FOLDER, read_oracles


def test_the_committed_oracles_are_those_of_the_specification():
    file = SHARED / "spec" / "oracles.json"
    if not file.is_file():
        pytest.skip("../shared/spec/oracles.json is absent")
    specified = {kind: cases for kind, cases in json.loads(file.read_text()).items() if isinstance(cases, list)}
    specified["methods"] = specified.pop("cases")
    assert {path.stem: read_oracles(path.stem) for path in FOLDER.glob("*.json")} == specified
