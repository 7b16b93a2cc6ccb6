"""What every public method owes, published or released: one that is added is tested by being there."""

import inspect

import pytest
import torch

from lightning_fedstop import methods
from lightning_fedstop.methods import released_code
from tests.methods.problems import METHODS, equal, public_methods, toy

ALL = METHODS | {f"released_code.{name}": method for name, method in public_methods(released_code).items()}
every = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


@pytest.mark.parametrize("name", public_methods())
def test_the_docstring_names_the_source_and_every_argument(name):
    method = getattr(methods, name)
    text = inspect.getdoc(method)
    assert "20" in text.split("\n")[0] or "arXiv" in text, "the paper and its year"
    for argument in inspect.signature(method).parameters:
        assert f"{argument}:" in text


@every
def test_what_it_sends_and_computes_is_declared(make):
    method = make()
    assert min(method.download_vectors, method.upload_vectors, method.gradients_per_step) >= 1


@every
def test_states_survive_a_round_trip(tmp_path, make):
    loop, rounds = toy(make, tmp_path)
    state = loop.method.state_dict()
    file = tmp_path / "state.pt"
    torch.save(state, file)
    again = make()
    again.setup(loop.method.federation)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert equal(again.state_dict(), state)
    assert torch.isfinite(rounds[-1]["theta"]).all()
