"""What the model takes from the data module, and how both are built from a configuration."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pkgutil import resolve_name
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI, _InstantiatorFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fedstop._cli_errors import parameters_of

DATA_LINKS = ("num_classes", "in_chans")


def linked_value(cli: LightningCLI, name: str) -> Callable[[LightningDataModule], Any]:
    """The function that computes the model's argument ``name`` from the data module.

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
    """Whether ``value`` is the user's: neither missing nor the default of the class."""
    return value is not None and value != _default(class_path, name)


def _default(class_path: str, name: str) -> Any:
    parameter = parameters_of(resolve_name(class_path)).get(name)
    return None if parameter is None else parameter.default


class Instantiator:
    """Builds the model or the data module so that ``load_from_checkpoint`` can build it again.

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
    """Say how to federate a data module that is not a federation, before the model asks for what it lacks.

    Raises:
        MisconfigurationException: If the class has no ``client_dataloader``.
    """
    if inspect.isclass(datamodule_class) and not hasattr(datamodule_class, "client_dataloader"):
        raise MisconfigurationException(
            f"{datamodule_class.__name__} has no clients; wrap it, as in `--data Federated --data.datamodule "
            f"{datamodule_class.__module__}.{datamodule_class.__qualname__} --data.num_clients 20`."
        )


class ErrorKeeper:
    """Wraps instantiators to keep the first error, which jsonargparse hides in a list of all that it tried."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def wrap(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """An instantiator that does as ``build`` does."""

        @wraps(build)
        def keeping(*args: Any, **kwargs: Any) -> Any:
            try:
                return build(*args, **kwargs)
            except Exception as error:
                self.error = self.error or error
                raise

        return keeping

    @contextmanager
    def unwrapped(self) -> Iterator[None]:
        """Raise the error that was kept instead of the one that tells of all attempts."""
        try:
            yield
        except Exception:
            if self.error is not None:
                raise self.error from None
            raise


def build_plainly(class_type: Any, *args: Any, **kwargs: Any) -> Any:
    """An instantiator for everything else."""
    return class_type(*args, **kwargs)
