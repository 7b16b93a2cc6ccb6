"""Finds out what a training step changes of a module besides its parameters and buffers."""

from copy import copy
from typing import Any

from torch import Tensor, nn


class Attributes:
    """The attributes of a module and the modules in it, with what lists, dicts and sets among them hold.

    Args:
        module: parameters and buffers count by which tensors they are, not by their values.
        restorable: keep the values of tensors that are neither, too, for :meth:`restore`.
    """

    def __init__(self, module: nn.Module, restorable: bool = False) -> None:
        self.module = module
        self.held = [(name, owner, dict(vars(owner))) for name, owner in module.named_modules()]
        self.copies = [
            {key: copy(value) for key, value in held.items() if isinstance(value, list | dict | set)}
            for _, _, held in self.held
        ]
        self.versions = [
            {key: value._version for key, value in held.items() if _is_plain_tensor(value)} for _, _, held in self.held
        ]
        self.values = [
            {key: held[key].detach().clone() for key in versions if restorable}
            for (_, _, held), versions in zip(self.held, self.versions, strict=True)
        ]

    def changed(self) -> list[str]:
        """The names of those that are others now, or hold others."""
        names = []
        for (path, owner, held), copies, versions in zip(self.held, self.copies, self.versions, strict=True):
            now = vars(owner)
            for name in held | now:
                same = name in held and name in now and now[name] is held[name]
                if same and name in versions:
                    same = versions[name] == now[name]._version
                if not same or (name in copies and _items(copies[name]) != _items(now[name])):
                    names.append(f"{path}.{name}".lstrip("."))
        return names

    def restore(self) -> None:
        """Put all of them back."""
        for (_, owner, held), copies, values in zip(self.held, self.copies, self.values, strict=True):
            for name, tensor in values.items():
                held[name].detach().copy_(tensor)
            for name, value in copies.items():
                if _items(value) != _items(held[name]):
                    held[name].clear()
                    (held[name].extend if isinstance(value, list) else held[name].update)(value)
            vars(owner).clear()
            vars(owner).update(held)


def _is_plain_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


def _items(values: Any) -> list[int]:
    """Which objects a collection holds."""
    items = [item for pair in values.items() for item in pair] if isinstance(values, dict) else values
    return [id(item) for item in items]
