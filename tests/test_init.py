"""The package's public names."""

import subprocess
import sys

import lightning_fedstop


def test_every_public_name_can_be_imported():
    assert sorted(lightning_fedstop.__all__) == dir(lightning_fedstop)
    for name in lightning_fedstop.__all__:
        assert getattr(lightning_fedstop, name) is not None


def test_the_criterion_needs_neither_torch_nor_lightning():
    code = (
        "import sys; from lightning_fedstop.stopping import stopping_round;"
        "assert stopping_round([1, 1.5, 1.5, 1.5], threshold=0.01, patience=2) == 4;"
        "assert not {'torch', 'lightning', 'timm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
