"""All ten methods, through the real loop, against numbers computed independently of this package."""

import numpy as np
import pytest
import torch

from lightning_fedstop import methods
from tests.helpers import check_case, oracle_params, run_case

# The oracles' names of hyperparameters, by method, as constructor arguments.
ARGUMENTS = {
    "lam": {"FedProx": "mu", "FedDyn": "alpha", "FedSpeed": "alpha", "FedSMOO": "alpha"},
    "rho": dict.fromkeys(("FedSAM", "FedSpeed", "FedSMOO", "FedGamma", "FedLESAM", "FedWMSAM"), "rho"),
    "alpha": {"FedWMSAM": "alpha_init"},
    "dual": {"FedSpeed": "dual_average"},
    "message": {"FedSMOO": "message"},
    "ref_L": {"SCAFFOLD": "control_gain", "FedGamma": "control_gain"},
    "variant": {"FedLESAM": "perturbation", "FedWMSAM": "perturbation"},
}
STATES = {"c": "c", "H": "H", "s": "s", "momentum": "m", "alpha": "alpha"}
CLIENT_STATES = {"c_i": "c", "h_i": "h", "mu_i": "mu"}


def method_of(case):
    given, name = case["input"], case["method"]
    arguments = {ARGUMENTS[key][name]: value for key, value in given.items() if key in ARGUMENTS}
    arguments = {key: "released_code" if value == "reference" else value for key, value in arguments.items()}
    if given.get("prox_split"):
        arguments["prox_inside_clip"] = False
    if given.get("variant") == "reference":
        arguments["memory"] = "last_round"
    return getattr(methods, name)(**arguments)


@pytest.mark.parametrize("case", oracle_params())
def test_oracle(case, tmp_path):
    rounds = run_case(case, method_of(case), tmp_path)
    check_case(case, rounds)
    for got, expected in zip(rounds, case["expected"], strict=True):
        for name, key in STATES.items():
            if name in expected:
                value = torch.as_tensor(got["state"][key], dtype=torch.float64).reshape(-1).tolist()
                assert value == pytest.approx(np.ravel(expected[name]).tolist(), abs=1e-9), name
        for name, key in CLIENT_STATES.items():
            for client, vector in expected.get(name, {}).items():
                written = got["states"].get((key, int(client)), torch.zeros(len(vector)))
                assert written.tolist() == pytest.approx(vector, abs=1e-9), (name, client)
