"""Calls hooks of callbacks and of the module in a ``Trainer``'s order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, LambdaCallback
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_fedstop.stopping.callbacks.base import CriterionCallback

Bound = list[Callable[..., Any]]

GRADIENT_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
OPTIMIZER_HOOKS = (
    "on_before_zero_grad",
    "on_before_optimizer_step",
    "optimizer_zero_grad",
    "optimizer_step",
    "configure_gradient_clipping",
)
BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")
CLIENT_HOOKS = ("on_client_start", "on_client_end")

_MONITORS = (EarlyStopping, Checkpoint)


class CallbackOwner(Protocol):
    """The loop, as far as hooks need it."""

    callbacks: list[Callback]
    datamodule: Any


class Hooks:
    """Calls hooks by name: the callbacks' with ``(loop, module, ...)``, then the module's with ``(...)``.

    As in a ``Trainer``, ``EarlyStopping`` and ``Checkpoint`` callbacks see ``on_train_epoch_end`` last: by
    :meth:`monitoring`, when what the others logged there can be monitored. Before them, by :meth:`deciding`, come the
    stopping rules of this package, which look at what the others have made of the model. Hooks that nobody overrides
    cost one dictionary look-up.

    Args:
        loop: passed to callbacks as their trainer.
        module: passed to callbacks, and owner of its own hooks.
    """

    def __init__(self, loop: CallbackOwner, module: LightningModule) -> None:
        self.loop = loop
        self.module = module
        self._bound: dict[str, Bound] = {}

    def __call__(self, name: str, *args: Any) -> list[Any]:
        """Call one hook and give what each of its owners returned."""
        bound = self._bound.get(name)
        if bound is None:
            bound = self._bound[name] = self._bind(name)
        if not bound:
            return []
        with self.naming(name):
            return [hook(*args) for hook in bound]

    @contextmanager
    def naming(self, name: str | None) -> Iterator[None]:
        """Let the module know which hook is running."""
        before = self.module._current_fx_name
        self.module._current_fx_name = name
        try:
            yield
        finally:
            self.module._current_fx_name = before

    def deciding(self, name: str) -> None:
        """Call one hook of the stopping rules of this package."""
        self._call_of(CriterionCallback, name)

    def monitoring(self, name: str) -> None:
        """Call one hook of the callbacks that monitor logged values."""
        self._call_of(_MONITORS, name)

    def _call_of(self, kind: type | tuple[type, ...], name: str) -> None:
        with self.naming(name):
            for hook in self._of_callbacks([c for c in self.loop.callbacks if isinstance(c, kind)], name):
                hook()

    def owners(self, name: str) -> list[Any]:
        """List the callbacks, and the module, that have a hook by this name."""
        callbacks = [callback for callback in self.loop.callbacks if _has(callback, name, Callback)]
        return callbacks + [self.module] * _has(self.module, name, LightningModule)

    def _bind(self, name: str) -> Bound:
        callbacks = self.loop.callbacks
        if name == "on_train_epoch_end":
            callbacks = [c for c in callbacks if not isinstance(c, (CriterionCallback, *_MONITORS))]
        return self._of_callbacks(callbacks, name) + self._of_module(name)

    def _of_callbacks(self, callbacks: Sequence[Callback], name: str) -> Bound:
        return [self._with_module(getattr(c, name)) for c in callbacks if _has(c, name, Callback)]

    def _with_module(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: hook(self.loop, self.module, *args)

    def _of_module(self, name: str) -> Bound:
        return [getattr(self.module, name)] if _has(self.module, name, LightningModule) else []


def is_users(owner: Any) -> bool:
    """Check whether an object is, or calls, a user's own code."""
    return isinstance(owner, LambdaCallback) or not type(owner).__module__.startswith(
        ("lightning.", "lightning_fedstop.")
    )


def _has(owner: Any, name: str, parent: type) -> bool:
    """Check whether ``owner`` has a hook of its own; hooks that only this package knows need no parent."""
    if not callable(getattr(owner, name, None)):
        return False
    # Lightning's check sees through mocks, partials and hooks set on the instance.
    return not hasattr(parent, name) or is_overridden(name, owner, parent=parent)
