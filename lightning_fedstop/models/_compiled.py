"""The repeated blocks of a backbone through ``torch.compile``, with a number of compilations that does not grow.

What is compiled is the forward and backward of a training step of one block. Blocks of one shape share it, so that a
backbone of 14 blocks compiles four, and one graph serves all batch sizes, because clients end on batches of any size.
"""

from typing import Any

import torch
from torch import Tensor, nn

BACKEND = "inductor"
"""What ``torch.compile`` hands a graph to."""

MOST_GRAPHS = 64
"""Graphs that dynamo may keep of one ``forward``: one for each shape of block and each precision."""

MOST_SHAPES = 24
"""Shapes of blocks that are compiled each; a backbone of more is compiled as a whole."""

SHORT = 16
"""torch's convolutions choose among kernels by whether a batch has fewer images, and a graph is for one choice."""

_functions: dict[tuple[type[nn.Module], str], Any] = {}


def compile_blocks(backbone: nn.Module) -> int:
    """Let the repeated blocks of a backbone train compiled, or all of it as one where few or none repeat.

    Names, parameters, classes and hooks of the modules stay as they are, and so does a checkpoint. Nothing is compiled
    before the first training step.

    Returns:
        How many modules were changed.
    """
    blocks = _blocks(backbone)
    shapes = {(type(block), *(parameter.shape for parameter in block.parameters())) for block in blocks}
    if not 0 < len(shapes) <= MOST_SHAPES:
        blocks = [backbone]
    for block in blocks:
        vars(block)["forward"] = CompiledForward(block)
    return len(blocks)


def _blocks(backbone: nn.Module) -> list[nn.Module]:
    """The members of the innermost rows of modules of one class that are more than one layer."""
    rows = [row for row in backbone.modules() if _is_row(row)]
    inner = [row for row in rows if not any(other is not row and _is_row(other) for other in row.modules())]
    return [block for row in inner for block in row.children()]


def _is_row(module: nn.Module) -> bool:
    blocks = list(module.children())
    alike = isinstance(module, nn.Sequential | nn.ModuleList) and len({type(block) for block in blocks}) == 1
    return alike and any(True for _ in blocks[0].children()) and any(True for _ in blocks[0].parameters())


class CompiledForward:
    """The ``forward`` of one module: compiled in a training step, as written otherwise.

    Evaluation runs as written, because it would need graphs of its own. So do a batch of one image, for which dynamo
    would make a graph of its own too, and ``torch.func`` transforms, whose tensors a compiled graph does not take.

    Args:
        module: whose forward it is; a copy or a pickle of the module has its own.
    """

    is_compiled = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._largest = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        module = self.module
        first = arguments[0] if arguments else None
        if not isinstance(first, Tensor) or not self._is_compiled_for(first):
            return type(module).forward(module, *arguments, **named)
        torch._dynamo.maybe_mark_dynamic(first, 0)
        try:
            return _compiled(type(module), first.device.type)(module, *arguments, **named)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            reason = str(error.inner_exception).strip().partition("\n")[0]
            raise RuntimeError(
                f"`compile=True`: torch could not compile {type(module).__name__} ({reason}); leave `compile` off."
            ) from error

    def _is_compiled_for(self, first: Tensor) -> bool:
        """In training; not a single image, nor a short last batch that torch's convolutions would take another way."""
        if not (self.module.training and torch.is_grad_enabled()) or is_transformed():
            return False
        self._largest = max(self._largest, len(first))
        return len(first) >= max(2, min(self._largest, SHORT))


def is_transformed() -> bool:
    """Whether a ``torch.func`` transform is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _compiled(kind: type[nn.Module], device: str) -> Any:
    key = kind, BACKEND
    if key not in _functions:
        check_compiler(device)
        _allow_graphs()
        _functions[key] = torch.compile(kind.forward, backend=BACKEND, dynamic=False)
    return _functions[key]


def _allow_graphs() -> None:
    """Dynamo runs a function as written once it has made its limit of graphs, 8: stages times precisions are more."""
    config: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    setattr(config, name, max(getattr(config, name), MOST_GRAPHS))


def check_compiler(device: str) -> None:
    """Refuse to compile for a CPU without a C++ compiler.

    Raises:
        RuntimeError: saying what is missing.
    """
    if device != "cpu" or BACKEND != "inductor":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        raise RuntimeError(
            "`compile=True` needs a C++ compiler to train on a CPU, and none was found: install one (g++ or clang), "
            "name it in the environment variable CXX, or leave `compile` off."
        ) from None
