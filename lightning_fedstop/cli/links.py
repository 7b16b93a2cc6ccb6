"""Links from the data module to the model, and how both are built."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pkgutil import resolve_name
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI, _InstantiatorFn, instantiate_class
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_fedstop.cli.names import all_parameters, resolved

DATA_LINKS = ("num_classes", "in_chans")


def linked_value(cli: LightningCLI, name: str) -> Callable[[LightningDataModule], Any]:
    """Make the function that computes the model's argument ``name`` from the data.

    A value given for the model that is not the default of its class stands. Otherwise the data module's attribute of
    this name counts, if it has one.
    """

    def compute(datamodule: LightningDataModule) -> Any:
        model = cli._get(cli.config, "model")
        if model is None:
            return None
        arguments = model.get("init_args", {})
        given = arguments.get(name)
        if name not in arguments or is_given(model["class_path"], name, given):
            return given
        try:
            value = getattr(datamodule, name, None)
        except (RuntimeError, ValueError):  # known only after `setup`
            value = None
        if value is None and _default(model["class_path"], name) is inspect.Parameter.empty:
            raise ValueError(
                f"model.{name}: {model['class_path']} needs it and {type(datamodule).__name__} does not say it; "
                f"give `--model.{name}`."
            )
        return given if value is None else value

    compute.__name__ = name
    return compute


def is_given(class_path: str, name: str, value: Any) -> bool:
    """Test for a value of the user: neither missing nor the class's default."""
    return value is not None and value != _default(class_path, name)


def _default(class_path: str, name: str) -> Any:
    parameter = all_parameters(resolve_name(class_path)).get(name)
    return None if parameter is None else parameter.default


class Instantiator:
    """Builder of a model or data module that ``load_from_checkpoint`` can build again.

    Lightning's own does so, but for a class inside (a data module that is wrapped) records the hyperparameters of the
    outer class, and for a class without a linked argument records that one too.
    """

    def __init__(self, cli: LightningCLI, key: str) -> None:
        self.cli = cli
        self.key = key
        self.record = _InstantiatorFn(cli=cli, key=key)

    def __call__(self, class_type: Any, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any) -> Any:
        """Build one object of ``class_type``."""
        config = self.cli._get(self.cli.config, self.key)
        path = config.get("class_path") if config else None
        if path is not None and resolve_name(path) is not class_type:
            return class_type(*args, **kwargs)
        links = {key: value for key, value in applied_instantiation_links.items() if key.rpartition(".")[2] in kwargs}
        if self.key == "data" and self.cli.subcommand not in ("validate", "test"):
            refuse_without_clients(class_type)
        return self.record(class_type, *args, applied_instantiation_links=links, **kwargs)


def refuse_without_clients(datamodule_class: Any) -> None:
    """Refuse a data module without clients, and say how to federate it.

    Raises:
        MisconfigurationException: If the class has no ``client_dataloader``.
    """
    if inspect.isclass(datamodule_class) and not hasattr(datamodule_class, "client_dataloader"):
        raise MisconfigurationException(
            f"{datamodule_class.__name__} has no clients; wrap it, as in `--data Federated --data.datamodule "
            f"{datamodule_class.__module__}.{datamodule_class.__qualname__} --data.num_clients 20`."
        )


class ErrorKeeper:
    """Keeper of the first error of instantiators, which jsonargparse hides in a list."""

    def __init__(self, cli: LightningCLI) -> None:
        self.cli = cli
        self.error: Exception | None = None

    def wrap(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an instantiator to keep its error."""

        @wraps(build)
        def keeping(class_type: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return build(class_type, *args, **kwargs)
            except Exception as error:
                if self.error is None:
                    key = config_key(self.cli, class_type, kwargs)
                    self.error = at_place(error, key, getattr(class_type, "__name__", ""))
                raise

        return keeping

    @contextmanager
    def unwrapped(self) -> Iterator[None]:
        """Raise the kept error instead of the list of all attempts."""
        try:
            yield
        except Exception:
            if self.error is not None:
                raise self.error from None
            raise


def at_place(error: Exception, key: str, class_name: str) -> Exception:
    """Attach the key and the class of the configuration at which an error arose."""
    if not hasattr(error, "config_place"):
        error.config_place = (key, class_name)  # type: ignore[attr-defined]
    return error


def config_key(cli: LightningCLI, class_type: Any, arguments: dict[str, Any]) -> str:
    """Key at which the configuration names a class, by its plain arguments if several do."""
    config = cli.config[cli.subcommand] if getattr(cli, "subcommand", None) else cli.config
    places = [(key, given) for key, path, given in _classes_in(config.as_dict(), "") if resolved(path) is class_type]
    for key, given in places:
        plain = {name: value for name, value in given.items() if isinstance(value, str | int | float)}
        if all(arguments.get(name, value) == value for name, value in plain.items()):
            return key
    return places[0][0] if places else ""


def _classes_in(value: Any, key: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Key, class path and arguments of each class in a configuration, the innermost first."""
    parts: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        inner = f"{key}[{name}]" if isinstance(value, list) else key if name == "init_args" else f"{key}.{name}"
        yield from _classes_in(part, inner.removeprefix("."))
    if isinstance(value, dict) and isinstance(value.get("class_path"), str):
        yield key, value["class_path"], value.get("init_args") or {}


def check_optimizer(cli: LightningCLI) -> None:
    """Try the optimizer and scheduler of the command line on one number.

    Raises:
        ValueError: for a scheduler without an optimizer, or with what the class has against its arguments.
    """
    optimizer, scheduler = cli._get(cli.config_init, "optimizer"), cli._get(cli.config_init, "lr_scheduler")
    if not optimizer:
        if scheduler:
            raise ValueError(
                "lr_scheduler: needs an optimizer beside it, as in `--optimizer SGD --optimizer.lr 0.1`; without one "
                "the model's own `configure_optimizers` decides both."
            )
        return
    with _at("optimizer", optimizer):
        built = instantiate_class(([nn.Parameter(torch.zeros(1))],), optimizer)
    if not scheduler:
        return
    with _at("lr_scheduler", scheduler), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = instantiate_class(built, scheduler)
        made.step(*[0.0] * isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau))


@contextmanager
def _at(key: str, config: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        name = config["class_path"].rpartition(".")[2]
        raise ValueError(f"{key}: {name} cannot be used as given: {type(error).__name__}: {error}.") from error


def build_plainly(class_type: Any, *args: Any, **kwargs: Any) -> Any:
    """Build an object of any other class."""
    return class_type(*args, **kwargs)
