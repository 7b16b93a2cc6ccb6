"""A module's trainable parameters and gradients as one vector each.

The vectors and the module share memory: writing to the vector moves the model, a backward pass fills the gradient
vector, and nothing is copied in between.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter


class FlatParameters:
    """Trainable parameters of a module as one vector, and their gradients as another.

    Frozen parameters (``requires_grad=False``) and buffers are left where they are. ``requires_grad`` is never changed.

    Args:
        module: the module whose parameters move into the vector. It stays usable as before; after :meth:`release` its
            parameters own their memory again.

    Attributes:
        vector: shape ``(d,)``; the parameters, in the order of ``module.parameters()``.
        grad: shape ``(d,)``; their gradients.
        unused: names of the parameters that :meth:`leave_out_unused` has left out since :meth:`zero_grad`.

    Raises:
        ValueError: if the module has no trainable parameter, trainable parameters of more than one dtype or device, or
            tensors that :func:`check_tensors` refuses.

    >>> layer = nn.Linear(2, 1)
    >>> flat = FlatParameters(layer)
    >>> flat.vector.zero_().shape
    torch.Size([3])
    >>> layer.weight.tolist()
    [[0.0, 0.0]]
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._check(module)
        self.parameters = [parameter for _, parameter in self.named]
        first = self.parameters[0]
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.vector = torch.empty(sum(self.sizes), dtype=first.dtype, device=first.device)
        self.grad = torch.zeros_like(self.vector)
        shapes = [parameter.shape for parameter in self.parameters]
        self._grads = _parts(self.grad, shapes)
        self.unused: list[str] = []
        self._written: list[int] = []
        for part, parameter in zip(_parts(self.vector, shapes), self.parameters, strict=True):
            part.copy_(parameter.detach())
            parameter.data = part

    def _check(self, module: nn.Module) -> None:
        who = type(module).__name__
        if not self.named:
            raise ValueError(f"{who} has no trainable parameter: at least one needs `requires_grad=True`.")
        check_tensors(module)
        dtypes = sorted({str(parameter.dtype) for _, parameter in self.named})
        devices = sorted({str(parameter.device) for _, parameter in self.named})
        if len(dtypes) > 1 or len(devices) > 1:
            raise ValueError(
                f"The trainable parameters of {who} must share one dtype and one device, got {dtypes} on {devices}."
            )

    def replaced(self) -> list[str]:
        """Names of parameters that were frozen, unfrozen, added or replaced since the vector was made."""
        now = {name: parameter for name, parameter in self._module.named_parameters() if parameter.requires_grad}
        before = dict(self.named)
        return [name for name in now | before if now.get(name) is not before.get(name)]

    def check_unchanged(self) -> None:
        """Refuse parameters that were frozen, unfrozen, added, replaced or moved since the vector was made.

        Raises:
            ValueError: naming them.
        """
        if changed := self.replaced():
            raise ValueError(
                f"The trainable parameters of {type(self._module).__name__} must stay the same during a fit, but"
                f" {', '.join(changed)} changed: set `requires_grad` before it, and prune or parametrize there or in"
                " `setup`."
            )
        parts = torch.split(self.vector, self.sizes)
        moved = [name for (name, p), part in zip(self.named, parts, strict=True) if p.data_ptr() != part.data_ptr()]
        if moved:
            raise ValueError(
                f"The trainable parameters of {type(self._module).__name__} must keep their memory during a fit, but"
                f" {', '.join(moved)} lies elsewhere now: write `parameter.data.copy_(...)` instead of"
                f" `parameter.data = ...`."
            )

    def __len__(self) -> int:
        return self.vector.numel()

    def zero_grad(self) -> None:
        """Zero all gradients and attach them, so that backward adds to the vector."""
        self.grad.zero_()
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            parameter.grad = grad
        self.unused = []
        # How often each has been written; parts with a storage of their own count for themselves.
        self._written = [grad._version for grad in self._grads]

    def leave_out_unused(self) -> bool:
        """Detach gradients that no backward pass has written since :meth:`zero_grad`, and no method's term.

        An optimizer leaves such parameters alone, weight decay and momentum included, as it does in a ``Trainer``.
        Where gradients are views of one storage (MPS), none is known to be unused.

        Returns:
            True if there are any; :attr:`unused` has their names.
        """
        for (name, parameter), grad, written in zip(self.named, self._grads, self._written, strict=True):
            if parameter.grad is grad and grad._version == written and not grad.any():
                parameter.grad = None
                self.unused.append(name)
        return bool(self.unused)

    @property
    def has_grad(self) -> bool:
        """True if the parameters have gradients attached: :meth:`detach_grad` was not called since."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def detach_grad(self) -> None:
        """Leave the parameters without gradients, until the next :meth:`zero_grad`."""
        for parameter in self.parameters:
            parameter.grad = None

    def gather_grad(self) -> None:
        """Bring gradients that something replaced, instead of adding to, back into the vector."""
        for number, (parameter, grad) in enumerate(zip(self.parameters, self._grads, strict=True)):
            if parameter.grad is grad:
                continue
            if parameter.grad is None:
                grad.zero_()
                self._written[number] = grad._version
            else:
                grad.copy_(parameter.grad)
            parameter.grad = grad

    @contextmanager
    def holding(self, vector: Tensor) -> Iterator[None]:
        """Let the module hold ``vector``, shape ``(d,)``, inside the block."""
        before = self.vector.clone()
        self.vector.copy_(vector)
        try:
            yield
        finally:
            self.vector.copy_(before)

    def release(self) -> None:
        """Give each parameter its own memory again and drop the gradients."""
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()
            parameter.grad = None


def check_tensors(module: nn.Module) -> None:
    """Refuse tensors of a module that cannot be trained over clients.

    Parameters to train are dense real floating-point numbers of at least two bytes. Frozen parameters and buffers may
    be of any kind, as long as they hold something.

    Raises:
        ValueError: naming the tensor, and what is allowed.
    """
    who = type(module).__name__
    for name, parameter in module.named_parameters():
        if (reason := _emptiness(parameter)) or (parameter.requires_grad and (reason := _oddity(parameter))):
            raise ValueError(f"Parameter {name!r} of {who} {reason}.")
    for name, buffer in module.named_buffers():
        if reason := _emptiness(buffer):
            raise ValueError(f"Buffer {name!r} of {who} {reason}.")


def _emptiness(tensor: Tensor) -> str | None:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "is lazy: run one batch through the module before `fit`"
    if tensor.is_meta:
        return "is on the device 'meta' and holds nothing: give it its values before `fit`, or in `configure_model`"
    if tensor.is_nested and tensor.layout == torch.strided:
        return "is nested, and cannot be compared: make it dense or jagged"
    return None


def _oddity(tensor: Tensor) -> str | None:
    if hasattr(tensor, "__tensor_flatten__"):
        return f"is a {type(tensor.data).__name__}: give `fit` a module of plain tensors, of which each process has all"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}: parameters must be dense to be trained, or have `requires_grad=False`"
    if tensor.is_complex():
        return f"has the dtype {tensor.dtype}: train it as real numbers, and use `torch.view_as_complex` in `forward`"
    if tensor.element_size() < 2:
        return f"has the dtype {tensor.dtype}: parameters need two bytes to be trained, or `requires_grad=False`"
    return None


def _parts(vector: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Cut a vector into tensors that share its memory.

    Each has a storage of its own, over its part of the vector's. Views would have the whole one, which ``torch.save``
    writes in full for any of them, and ``safetensors`` refuses.
    """
    if vector.device.type not in ("cpu", "cuda"):
        # Elsewhere an address plus an offset may be no address: on MPS it is that of an object.
        sizes = [shape.numel() for shape in shapes]
        return [part.view(shape) for part, shape in zip(torch.split(vector, sizes), shapes, strict=True)]
    storage, size = vector.untyped_storage(), vector.element_size()
    ends = list(accumulate((shape.numel() for shape in shapes), initial=0))
    return [
        vector.new_empty(0).set_(storage[start * size : stop * size], 0, shape)  # type: ignore[call-overload]
        for start, stop, shape in zip(ends, ends[1:], shapes, strict=False)
    ]


def is_finite(vector: Tensor) -> bool:
    """Check whether all numbers are finite.

    Their sum is not if one of them is not, and takes a tenth of the time; a sum that overflows is looked at again.

    >>> is_finite(torch.tensor([3e38, 3e38])), is_finite(torch.tensor([1.0, torch.nan]))
    (True, False)
    """
    return math.isfinite(vector.sum()) or bool(torch.isfinite(vector).all())


def norm(vector: Tensor, keepdim: bool = False) -> Tensor:
    """Compute the 2-norm over the last dimension, exact for any length and precision.

    ``torch.linalg.vector_norm`` adds up in the vector's own precision: in float32 on a CPU its norm of 86 million
    numbers is 0.9 percent short, and infinite where a square is. With ``dtype=torch.float64`` it copies the whole
    vector first.

    Args:
        vector: shape ``(..., d)``, of a floating dtype.
        keepdim: give the shape ``(..., 1)`` instead of ``(...)``.

    Returns:
        float64, with a relative error of about 1e-12; on Apple's GPUs, which have no float64, float32 and about 1e-7.

    >>> norm(torch.tensor([3.0, 4.0]))
    tensor(5., dtype=torch.float64)
    """
    if vector.device.type == "mps":
        length = _norm_in_float32(vector)
        return length if keepdim else length.squeeze(-1)
    # In float64 a block stays in a CPU's cache; elsewhere many small blocks take longer than the sum itself.
    room, numbers = 1 << 18 if vector.device.type == "cpu" else 1 << 24, vector.numel()
    if numbers > room:
        blocks = torch.split(vector, max(1, room * vector.shape[-1] // numbers), dim=-1)
        # One block for all: freed ones, with the small norms between them, would not be used again on a CPU.
        wide = torch.empty_like(blocks[0], dtype=torch.float64, memory_format=torch.contiguous_format)
        vector = torch.cat(
            [
                torch.linalg.vector_norm(wide[..., : block.shape[-1]].copy_(block), dim=-1, keepdim=True)
                for block in blocks
            ],
            dim=-1,
        )
    norms: Tensor = torch.linalg.vector_norm(vector, dim=-1, keepdim=keepdim, dtype=torch.float64)
    return norms


def _norm_in_float32(vector: Tensor, size: int = 1 << 12) -> Tensor:
    """The 2-norm, shape ``(..., 1)``, in two levels of short sums, scaled so that squares stay within range."""
    largest = vector.abs().amax(dim=-1, keepdim=True).float()
    scaled = vector / largest.clamp(min=torch.finfo(torch.float32).tiny)
    whole = vector.shape[-1] // size * size
    rows = scaled[..., :whole].reshape(*vector.shape[:-1], -1, size)
    parts = [torch.linalg.vector_norm(rows, dim=-1)]
    parts += [torch.linalg.vector_norm(scaled[..., whole:], dim=-1, keepdim=True)]
    length: Tensor = largest * torch.linalg.vector_norm(torch.cat(parts, dim=-1), dim=-1, keepdim=True)
    return length
