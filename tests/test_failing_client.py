"""A client whose training raises is named with its round; what it raised stays what it is."""

import re
import sys

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fedstop.federation.cohort import ScheduledCohort
from tests.cli_classes import TenClasses
from tests.cli_tools import TINY, refusal
from tests.helpers import ToyData, ToyModule, fit

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes, a warning says it")
SCHEDULE = [[0, 1, 2], [3, 1, 4]]


class UsersError(ArithmeticError):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


class FailingModule(ToyModule):
    is_thread_safe = True

    def training_step(self, batch, batch_idx):
        if (batch[0] == 77).any():
            raise UsersError(5)
        return super().training_step(batch, batch_idx)


class FailingData(ToyData):
    """The last sample of client 4 is one that the module fails at, or its loader fails."""

    is_thread_safe = True

    def __init__(self, loads=True):
        super().__init__()
        self.loads = loads
        self.x[sum(self.client_sizes) - 1] = 77.0

    def client_dataloader(self, client, generator):
        if client == 4 and not self.loads:
            raise UsersError(5)
        return super().client_dataloader(client, generator)


@pytest.mark.filterwarnings("ignore:.*trains one client after the other instead.*")
@pytest.mark.parametrize("loads", [True, False], ids=["in its step", "in its loader"])
@pytest.mark.parametrize("backend", ["sequential", "threads", "stacked"])
def test_the_client_and_the_round_are_noted(tmp_path, backend, loads):
    with pytest.raises(UsersError) as raised:
        fit(
            tmp_path,
            module=FailingModule(),
            data=FailingData(loads),
            cohort=ScheduledCohort(SCHEDULE),
            client_backend=backend,
        )
    assert raised.value.code == 5
    assert str(raised.value) == "code 5"
    assert raised.value.__notes__ == ["It was raised in the training of client 4 in round 2."]


class Refuses(TenClasses):
    def training_step(self, batch, batch_idx):
        raise MisconfigurationException("There is no training today.")


def test_the_command_says_it_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    error = refusal(capsys, "fit", *TINY, "--model", "tests.test_failing_client.Refuses")
    assert re.match(
        r"There is no training today. It was raised in the training of client \d in round 1\.$", error.strip()
    )
