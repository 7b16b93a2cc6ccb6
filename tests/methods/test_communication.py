"""The bytes a client would receive and send, as section 3 of the specification counts them."""

import pytest

from lightning_fedstop import methods
from lightning_fedstop.records import read_rounds
from tests.helpers import fit


@pytest.mark.parametrize(
    ("method", "down", "up"),
    [
        (methods.FedAvg(), 1, 1),
        (methods.FedProx(), 1, 1),
        (methods.FedSAM(), 1, 1),
        (methods.SCAFFOLD(), 2, 1),
        (methods.FedGamma(), 2, 1),
        (methods.FedDyn(), 1, 1),
        (methods.FedSpeed(), 1, 1),
        (methods.FedSMOO(), 2, 2),
        (methods.FedLESAM(), 1, 1),
        (methods.FedLESAM(memory="last_round"), 2, 1),
        (methods.FedWMSAM(), 3, 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, methods.FederatedMethod) else str(value),
)
def test_bytes_of_a_round(method, down, up, tmp_path):
    loop, module = fit(tmp_path, method=method, max_rounds=1, clients_per_round=3)
    (row,) = read_rounds(f"{loop.log_dir}/metrics.csv")
    bytes_of_model = 4 * sum(parameter.numel() for parameter in module.parameters())
    assert int(row["bytes_down"]) == 3 * down * bytes_of_model
    assert int(row["bytes_up"]) == 3 * up * bytes_of_model
