"""The state of a module outside its trainable parameters: buffers, and parameters that are frozen."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def untrained_tensors(module: nn.Module, trained: Iterable[Tensor]) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Walk over buffers and parameters that are not trained.

    Args:
        module: the module.
        trained: its trainable parameters.

    Yields:
        Each tensor's full name, the module that holds it, its name there, and the tensor; once if it is shared.
    """
    seen = {id(parameter) for parameter in trained}
    for path, owner in module.named_modules():
        for key, tensor in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{key}" if path else key, owner, key, tensor


class ModuleState:
    """Copy of the buffers and frozen parameters of a module. Memory: that of these tensors.

    Args:
        module: the module, which may fill such a tensor in training, or put another in its place.
        trained: its trainable parameters, which are no part of the state.

    Attributes:
        values: the copies, by name.

    >>> layer = nn.BatchNorm1d(1)
    >>> state = ModuleState(layer, layer.parameters())
    >>> _ = layer(torch.ones(2, 1))
    >>> list(state.changed())
    ['running_mean', 'running_var', 'num_batches_tracked']
    >>> state.restore()
    >>> state.changed()
    {}
    """

    def __init__(self, module: nn.Module, trained: Iterable[Tensor]) -> None:
        self._module = module
        self._trained = list(trained)
        found = list(untrained_tensors(module, self._trained))
        self._owners = {name: (owner, key) for name, owner, key, _ in found}
        self._tensors = {name: tensor for name, _, _, tensor in found}
        self.values = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}

    def changed(self) -> dict[str, Tensor]:
        """Find the tensors that are not what they were, as they are now; one that is gone is empty."""
        now = {name: self._now(name) for name in self.values}
        flags = differ([(tensor, self.values[name]) for name, tensor in now.items()])
        return {name: tensor for (name, tensor), one in zip(now.items(), flags, strict=True) if one}

    def restore(self) -> None:
        """Put the copies back into the module."""
        for name, (owner, key) in self._owners.items():
            tensor, value = self._tensors[name], self.values[name]
            if getattr(owner, key, None) is not tensor:
                setattr(owner, key, tensor)
            # Writing costs what comparing does, but on a CPU it would copy pages of mapped files; elsewhere comparing
            # waits for the device.
            writes = tensor.device.type != "cpu" and is_averageable(tensor) and tensor.is_contiguous()
            if writes or differ([(tensor, value)])[0]:
                overwrite(tensor, value)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let the module hold the copies inside the block, and what it held before afterwards."""
        held = {name: (getattr(*self._owners[name], None), t.clone()) for name, t in self.changed().items()}
        self.restore()
        try:
            yield
        finally:
            for name, (tensor, value) in held.items():
                setattr(*self._owners[name], tensor)
                if tensor is not None and differ([(tensor, value)])[0]:
                    overwrite(tensor, value)

    def check_names(self) -> None:
        """Refuse tensors that training has added to the module.

        Raises:
            ValueError: naming the first.
        """
        for name, *_ in untrained_tensors(self._module, self._trained):
            if name not in self.values:
                raise ValueError(
                    f"{name!r} of {type(self._module).__name__} appeared in a client's training: give it its shape"
                    " before `fit`, so that all clients start from the same."
                )

    def overwrite(self, state: Mapping[str, Tensor]) -> None:
        """Let tensors of the module hold copies of those in ``state``, of whatever shape."""
        for name, value in state.items():
            overwrite(self._tensors[name], value)

    def put(self, name: str, value: Tensor) -> None:
        """Write ``value``, of the tensor's shape, into the module."""
        self._tensors[name].detach().copy_(value)

    def _now(self, name: str) -> Tensor:
        tensor = getattr(*self._owners[name], None)
        return torch.empty(0) if tensor is None else tensor.detach()


def is_averageable(tensor: Tensor) -> bool:
    """Check whether a tensor holds plain numbers: dense, neither quantised nor a wrapper of other tensors."""
    is_wrapper = hasattr(tensor, "__tensor_flatten__")
    return tensor.layout == torch.strided and not tensor.is_quantized and not is_wrapper


def overwrite(tensor: Tensor, value: Tensor) -> None:
    """Let ``tensor`` hold a copy of ``value``, whatever it was before."""
    # Neither way works for all: `data` of compressed sparse tensors cannot be set, and copying keeps a quantised scale.
    if _kind(tensor) == _kind(value) and not tensor.is_quantized and tensor.layout != torch.sparse_coo:
        tensor.detach().copy_(value)
    else:
        tensor.data = value.clone()


def difference(before: Tensor, after: Tensor) -> str | None:
    """Name what else than its numbers has changed of a tensor, ``None`` if nothing has."""
    for what, one, other in zip(("shape", "dtype", "device", "layout"), _kind(before), _kind(after), strict=True):
        if one != other:
            names = [str(tuple(kind)) if isinstance(kind, torch.Size) else str(kind) for kind in (one, other)]
            return f"its {what} from {' to '.join(names)}"
    return None


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, torch.layout]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def differ(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Check whether the tensors of each pair differ in any bit; waits once for a device."""
    flags: list[bool | Tensor] = [_differs(one, other) for one, other in pairs]
    waiting = [flag for flag in flags if isinstance(flag, Tensor)]
    known = iter(torch.stack(waiting).tolist() if waiting else [])
    return [next(known) if isinstance(flag, Tensor) else flag for flag in flags]


def _differs(one: Tensor, other: Tensor) -> bool | Tensor:
    if difference(other, one) is not None:
        return True
    parts = list(zip(_parts(one), _parts(other), strict=True))
    if one.device.type == "cpu" or len(parts) != 1:
        return not all(torch.equal(a, b) for a, b in parts)
    return torch.ne(*parts[0]).any()


def _parts(tensor: Tensor) -> list[Tensor]:
    """The bits of a tensor of any kind, as integers: NaN equals itself there, and no kind lacks a comparison."""
    inner: list[Tensor]
    if hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.layout == torch.sparse_coo:
        inner = [tensor._indices(), tensor._values()]  # the public ones refuse what is not coalesced
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        inner = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        inner = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif tensor.is_quantized and tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        inner = [tensor.int_repr(), torch.tensor(tensor.q_scale()), torch.tensor(tensor.q_zero_point())]
    elif tensor.is_quantized:
        inner = [tensor.int_repr(), tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    else:
        numbers = tensor.resolve_conj().resolve_neg()
        numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
        return [numbers.view(_INTEGERS[numbers.element_size()])]
    return [part for one in inner for part in _parts(one)]
