"""Layers that keep several threads from training copies of a backbone at once."""

from torch import nn

_DRAWING = {"FractionalMaxPool2d", "RReLU", "RotaryEmbeddingDinoV3", "Shuffle", "VOLO"}
"""Classes of torch and timm that may draw random numbers in training without a rate of anything dropped."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def draws(layer: nn.Module) -> bool:
    """Check whether a layer may draw random numbers in training, as dropout and stochastic depth do.

    >>> draws(nn.Dropout(0.1)), draws(nn.Dropout(0.0)), draws(nn.Linear(2, 2))
    (True, False, False)
    """
    kind = type(layer).__name__
    rates = (
        value
        for name, value in vars(layer).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "drop" in f"{kind}.{name}".lower()
    )
    return kind in _DRAWING or any(rate > 0 for rate in rates)


def has_hooks(layer: nn.Module) -> bool:
    """Check for hooks, which all copies of a layer would call."""
    return any(getattr(layer, name, None) for name in _HOOKS)
