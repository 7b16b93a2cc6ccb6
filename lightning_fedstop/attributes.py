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
        self.items = [
            {key: _items(held[key]) for key in copies}
            for (_, _, held), copies in zip(self.held, self.copies, strict=True)
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
        for (path, owner, held), items, versions in zip(self.held, self.items, self.versions, strict=True):
            now = vars(owner)
            found = [name for name in held | now if now.get(name, self) is not held.get(name, self)]
            # Most of them are empty dicts of hooks, before and after.
            found += [name for name, ids in items.items() if (ids or held[name]) and _items(held[name]) != ids]
            found += [name for name, before in versions.items() if held[name]._version != before]
            names += [f"{path}.{name}".lstrip(".") for name in dict.fromkeys(found)]
        return names

    def restore(self) -> None:
        """Put all of them back."""
        for (_, owner, held), copies, items, values in zip(
            self.held, self.copies, self.items, self.values, strict=True
        ):
            for name, tensor in values.items():
                held[name].detach().copy_(tensor)
            for name, value in copies.items():
                if items[name] != _items(held[name]):
                    held[name].clear()
                    (held[name].extend if isinstance(value, list) else held[name].update)(value)
            vars(owner).clear()
            vars(owner).update(held)


def _is_plain_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


def _items(values: Any) -> list[int]:
    """Which objects a collection holds."""
    return [*map(id, values), *(map(id, values.values()) if isinstance(values, dict) else ())]
