"""What a step changes of a module besides parameters and buffers is seen, and can be put back."""

import pytest
import torch
from torch import nn

from lightning_fedstop.attributes import Attributes


class Holder(nn.Module):
    """Holds one of each kind of thing."""

    def __init__(self):
        super().__init__()
        self.layer = nn.BatchNorm1d(3)
        self.layer.seen = [1]
        self.count = 0
        self.names = {"a": 1}
        self.kept = torch.zeros(2)


def run(module):
    module.layer(torch.randn(4, 3))


CHANGES = {
    "count": lambda m: setattr(m, "count", 1),
    "names": lambda m: m.names.update(b=2),
    "kept": lambda m: m.kept.add_(1),
    "layer.seen": lambda m: m.layer.seen.append(2),
    "new": lambda m: setattr(m, "new", None),
    "gone": lambda m: delattr(m, "count"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_put_back(name):
    module = Holder()
    attributes = Attributes(module, restorable=True)
    CHANGES[name](module)
    assert attributes.changed() == ["count" if name == "gone" else name]
    attributes.restore()
    assert set(attributes.changed()) <= {"kept"}  # whose values are written, which raises its version
    assert (module.count, module.names, module.kept.tolist(), module.layer.seen) == (0, {"a": 1}, [0, 0], [1])
    assert not hasattr(module, "new")


def test_training_alone_changes_nothing_by_this_measure():
    module = Holder()
    attributes = Attributes(module)
    run(module)
    with torch.no_grad():
        module.layer.weight.add_(1)
    assert attributes.changed() == []


def test_a_set_counts_by_what_it_holds():
    module = Holder()
    module.seen = {8, 0, "a"}
    attributes = Attributes(module)
    module.seen.discard("b")
    assert attributes.changed() == []
    module.seen.add("b")
    assert attributes.changed() == ["seen"]
