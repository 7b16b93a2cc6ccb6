"""Logged values, gathered over a round or an evaluation and reported once."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

Reduce = Callable[[Tensor, str], Tensor]
REDUCTIONS = ("mean", "sum", "min", "max")


@dataclass
class _Entry:
    """One logged name: a running reduction of numbers, or a ``Metric`` of the module."""

    reduce_fx: str
    prog_bar: bool
    logger: bool
    forked: bool
    metric: str | None = None
    value: Tensor | None = None
    weight: Tensor | float = 0.0

    def update(self, value: Tensor, batch_size: int) -> None:
        value = value.detach() if value.dim() == 0 else value.detach().reshape(())
        if self.reduce_fx in ("mean", "sum"):
            # One operation, which also brings the value to the sum's precision.
            total = value.new_zeros((), dtype=torch.float64) if self.value is None else self.value
            self.value = torch.add(total, value, alpha=batch_size if self.reduce_fx == "mean" else 1)
            self.weight += batch_size
        else:
            self.add(value.to(torch.float64, copy=True), batch_size)

    def update_each(self, values: Tensor, batch_sizes: Tensor) -> None:
        """Take one value of each client of a stack; both have the shape ``(M,)``."""
        values = values.detach().to(torch.float64)
        reduction = {"min": torch.amin, "max": torch.amax}.get(self.reduce_fx, torch.sum)
        self.add(reduction(values * batch_sizes if self.reduce_fx == "mean" else values), batch_sizes.sum())

    def add(self, value: Tensor, weight: Tensor | float) -> None:
        """Add a value that is reduced already."""
        if self.value is None:
            self.value = value
        elif self.reduce_fx == "min":
            self.value = torch.minimum(self.value, value)
        elif self.reduce_fx == "max":
            self.value = torch.maximum(self.value, value)
        else:
            self.value = self.value + value
        self.weight += weight


@dataclass
class Caught:
    """One logged value that waits for a stack of clients to have values: see :meth:`ResultCollector.catching`."""

    entry: _Entry
    value: Tensor
    batch_size: int | None


@dataclass
class Results:
    """The reported metrics: all of them, those for loggers, those for the progress bar."""

    callback: dict[str, Tensor] = field(default_factory=dict)
    logged: dict[str, Tensor] = field(default_factory=dict)
    prog_bar: dict[str, float] = field(default_factory=dict)


class ResultCollector:
    """Stands behind ``self.log`` of a module and its submodules while a loop runs.

    Numbers stay on their device until :meth:`compute`. With ``reduce_fx="mean"`` they are averaged over samples, with
    the weight ``batch_size`` (found in the batch where the caller does not give it): what is logged in
    ``training_step`` comes out as the mean over all samples that the cohort trained on. ``on_step=True`` adds no
    reports: a round is reported once.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.batch: Any = None
        self.dataloader_suffix = ""
        self._batch_size: int | None = None
        self._muted = False
        self._caught: list[Caught] | None = None
        self._entries: dict[str, _Entry] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let ``self.log`` of the module, and of modules inside it, report here."""
        modules = [module for module in self.module.modules() if isinstance(module, LightningModule)]
        before = [module.__dict__.get("log") for module in modules]
        for module in modules:
            module.__dict__["log"] = self.log
        try:
            yield
        finally:
            for module, log in zip(modules, before, strict=True):
                if log is None:
                    del module.__dict__["log"]
                else:
                    module.__dict__["log"] = log

    @contextmanager
    def muted(self, muted: bool = True) -> Iterator[None]:
        """Ignore what is logged inside the block: a second pass over the same batch reports nothing."""
        before, self._muted = self._muted, self._muted or muted
        try:
            yield
        finally:
            self._muted = before

    @contextmanager
    def catching(self) -> Iterator[list[Caught]]:
        """Catch what is logged inside the block, for a stack of clients, in a list."""
        caught: list[Caught] = []
        self._caught = caught
        try:
            yield caught
        finally:
            self._caught = None

    def snapshot(self) -> dict[str, _Entry]:
        """Copy what was logged so far, for :meth:`restore`."""
        return {name: replace(entry) for name, entry in self._entries.items()}

    def restore(self, entries: dict[str, _Entry]) -> None:
        """Forget what was logged since the snapshot."""
        self._entries = entries

    def take(self) -> dict[str, _Entry]:
        """Give what was logged so far and forget it."""
        entries, self._entries = self._entries, {}
        return entries

    def merge(self, entries: dict[str, _Entry]) -> None:
        """Add what another collector has taken.

        Raises:
            MisconfigurationException: for a ``Metric`` object, of which each thread has had a copy.
        """
        for name, entry in entries.items():
            if entry.metric is not None:
                raise MisconfigurationException(
                    f"{type(self.module).__name__} logs the Metric {entry.metric!r} in `training_step`, of which each"
                    f" thread has a copy: log a number, or train with `client_backend='sequential'`."
                )
            mine = self._entries.get(name)
            if mine is None:
                self._entries[name] = entry
            elif entry.value is not None:
                mine.add(entry.value, entry.weight)

    def start_batch(self, batch: Any) -> None:
        """Name the batch that follows, whose size weighs what is logged next; ``None`` after the last one."""
        self.batch = batch
        self._batch_size = None

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Take one value; the arguments are those of ``LightningModule.log``.

        Raises:
            ValueError: for a value that is no number, one-element tensor, ``Metric`` or flat dict of them, for an
                unknown ``reduce_fx``, or for a ``Metric`` that is no attribute of the module.
            MisconfigurationException: for a ``Metric`` in a step of a stack of clients.
        """
        if self._caught is not None and isinstance(value, Metric):
            raise MisconfigurationException(
                f"{type(self.module).__name__} logs the Metric {name!r}, which all clients of a stack would share"
            )
        if self._muted:
            return
        if isinstance(value, dict):
            for key, item in value.items():
                self.log(f"{name}.{key}", item, prog_bar, logger, on_step, on_epoch, reduce_fx, batch_size=batch_size)
            return
        if add_dataloader_idx:
            name += self.dataloader_suffix
        entry = self._entries.get(name)
        if entry is None:
            reduction = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "?")
            reduction = {"avg": "mean", "amin": "min", "amax": "max"}.get(reduction, reduction)
            if reduction not in REDUCTIONS:
                raise ValueError(f"`reduce_fx` of logged {name!r} must be one of {REDUCTIONS}, got {reduce_fx!r}.")
            entry = _Entry(reduction, prog_bar, logger is not False, forked=bool(on_step and on_epoch))
            self._entries[name] = entry
        if isinstance(value, Metric):
            entry.metric = self._attribute_of(value, name)
        elif self._caught is not None:
            self._caught.append(Caught(entry, self._tensor(value, name), batch_size))
        else:
            entry.update(self._tensor(value, name), self._size(batch_size))

    def _tensor(self, value: Any, name: str) -> Tensor:
        if isinstance(value, Tensor):
            if value.numel() == 1:
                return value
        elif isinstance(value, int | float) or hasattr(value, "__float__"):
            return torch.tensor(float(value), dtype=torch.float64)
        raise ValueError(f"Logged {name!r} must be a number or a tensor of one element, got {type(value).__name__}.")

    def _attribute_of(self, metric: Metric, name: str) -> str:
        for attribute, module in self.module.named_modules():
            if module is metric:
                return str(attribute)
        raise ValueError(f"The metric logged as {name!r} must be an attribute of {type(self.module).__name__}.")

    def _size(self, batch_size: int | None) -> int:
        if batch_size is not None:
            return batch_size
        if self.batch is None:
            return 1
        if self._batch_size is None:
            self._batch_size = extract_batch_size(self.batch)
        return self._batch_size

    def compute(self, reduce: Reduce, gather: Callable[[list[Any]], Iterable[Any]]) -> Results:
        """Compute the metrics over all processes; forgets them, and resets the ``Metric`` objects.

        Args:
            reduce: reduces a tensor over processes.
            gather: gives the lists that all processes pass in, in order of rank. A process that trained no client has
                logged nothing and learns the names here.
        """
        header = [(name, e.reduce_fx, e.prog_bar, e.logger, e.forked, e.metric) for name, e in self._entries.items()]
        results = Results()
        for name, *fields in dict.fromkeys(item for part in gather(header) for item in part):
            entry = self._entries.get(name) or _Entry(*fields)
            entry.metric = fields[-1]
            value = self._value(entry, reduce)
            self._report(results, name, entry, value)
        self._entries.clear()
        return results

    def _value(self, entry: _Entry, reduce: Reduce) -> Tensor:
        if entry.metric is not None:
            metric = self.module.get_submodule(entry.metric)
            assert isinstance(metric, Metric)
            value: Tensor = metric.compute()
            metric.reset()
            return value.detach()
        device = self.module.device
        neutral = {"min": torch.inf, "max": -torch.inf}.get(entry.reduce_fx, 0.0)
        value = torch.as_tensor(neutral if entry.value is None else entry.value, dtype=torch.float64, device=device)
        if entry.reduce_fx in ("min", "max"):
            return reduce(value, entry.reduce_fx)
        total = reduce(value, "sum")
        if entry.reduce_fx == "sum":
            return total
        weight = reduce(torch.as_tensor(entry.weight, dtype=torch.float64, device=device), "sum")
        return total / weight

    @staticmethod
    def _report(results: Results, name: str, entry: _Entry, value: Tensor) -> None:
        if value.numel() != 1:
            raise ValueError(f"Logged {name!r} must come to one number, got the shape {tuple(value.shape)}.")
        value = value.reshape(())
        names = [name, f"{name}_epoch"] if entry.forked else [name]
        for key in names:
            results.callback[key] = value
        if entry.logger:
            results.logged[names[-1]] = value
        if entry.prog_bar:
            results.prog_bar[name] = float(value)
