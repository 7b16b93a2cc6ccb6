"""``LightningCLI`` over a :class:`~lightning_fedstop.loop.FederatedLoop` instead of a ``Trainer``."""

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback

from lightning_fedstop.__about__ import __version__
from lightning_fedstop.cli.config_files import is_named, read_configs
from lightning_fedstop.cli.explain import explain
from lightning_fedstop.cli.links import (
    DATA_LINKS,
    ErrorKeeper,
    Instantiator,
    at_place,
    build_plainly,
    check_optimizer,
    is_given,
    linked_value,
)
from lightning_fedstop.cli.override import own_defaults
from lightning_fedstop.data import MedMNIST
from lightning_fedstop.data.registry import public_classes
from lightning_fedstop.loop.checkpoint_file import read_checkpoint
from lightning_fedstop.loop.federated_loop import FederatedLoop
from lightning_fedstop.models import ImageClassifier
from lightning_fedstop.utilities.paths import local_path

# Short class names in a configuration are looked up among the classes that have been imported.
for _module in ("cohort", "methods", "data", "models", "stopping.baselines", "stopping.consensus_early_stopping"):
    import_module(f"lightning_fedstop.{_module}")
public_classes(LightningDataModule)  # which imports all files of skews and data modules
# `released_code.FedLESAM` is how the methods' documentation and the paper's configurations name that class.
sys.modules.setdefault("released_code", import_module("lightning_fedstop.methods.released_code"))


class FedStopParser(LightningArgumentParser):
    """Parser that names a wrong key in one sentence, with what exists."""

    commands: Mapping[str, LightningArgumentParser] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Here, since jsonargparse makes parsers of this class by itself, for the arguments of classes inside.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with code 2 after one sentence, or raise where the caller handles errors."""
        if not self.exit_on_error:
            super().error(message, ex)
        # A whole configuration is checked by the parser of all commands, which does not know the keys of each.
        parser = next((self.commands[arg] for arg in self.args or [] if arg in self.commands), self)
        sys.stderr.write(f"{parser.prog.replace(' [options]', '')}: error: {explain(message, parser)}\n")
        raise SystemExit(2) from ex


class RunConfigCallback(SaveConfigCallback):
    """Writer of a configuration that can be run again into the run's version folder.

    A run that is continued in its folder leaves the first ``config.yaml`` as it is and writes ``config_1.yaml``.
    """

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Write the file, once, on the first process."""
        log_dir = trainer.log_dir
        if self.already_saved or log_dir is None:
            return
        self.already_saved = True
        if not trainer.is_global_zero:
            return
        folder = Path(log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path, number = folder / self.config_filename, 0
        while path.exists():
            number += 1
            path = folder / f"{Path(self.config_filename).stem}_{number}.yaml"
        config = self.config.clone()
        for name in DATA_LINKS:
            # Left out where the data decides, so that it decides again; kept where the user did.
            key = f"model.init_args.{name}"
            if key in config and not is_given(config.model.class_path, name, config[key]):
                config.pop(key)
        text = self.parser.dump(config, skip_none=False, skip_link_targets=False)
        with trainer.reporter.writing(path):
            path.write_text(text, encoding="utf-8")


class FedStopCLI(LightningCLI):
    """Commands ``fit``, ``validate`` and ``test``, with the habits of ``LightningCLI``.

    ``--model`` and ``--data`` take any class; :class:`~lightning_fedstop.models.ImageClassifier` and
    :class:`~lightning_fedstop.data.MedMNIST` are the defaults. ``--trainer`` is a
    :class:`~lightning_fedstop.loop.FederatedLoop`. The model's ``num_classes`` and ``in_chans`` come from the data
    module where both classes have them; a value given for the model that is not its default stands.

    Args:
        args: The arguments, those of the process by default.
        run: Run the subcommand that ``args`` begins with; otherwise only build model, data and loop.
        **kwargs: As for ``LightningCLI``.
    """

    config: Namespace
    model_is_named: bool

    def __init__(self, args: ArgsType = None, run: bool = True, **kwargs: Any) -> None:
        header = {"dump_header": [f"lightning-fedstop=={__version__}"]}
        parser_kwargs = {
            "prog": "fedstop",
            "description": "Federated learning that stops by itself.",
            **header,
            **dict.fromkeys(self.subcommands(), header),
            **kwargs.pop("parser_kwargs", {}),
        }
        defaults: dict[str, Any] = {
            "model_class": LightningModule,
            "datamodule_class": LightningDataModule,
            "trainer_class": FederatedLoop,
            "parser_class": FedStopParser,
            "save_config_callback": RunConfigCallback,
            "seed_everything_default": 0,
            "subclass_mode_model": True,
            "subclass_mode_data": True,
        }
        given = sys.argv[1:] if args is None else args
        self._command = given[0] if isinstance(given, list) and given and given[0] in self.subcommands() else None
        super().__init__(args=args, run=run, parser_kwargs=parser_kwargs, **{**defaults, **kwargs})

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Build the parsers, and let the first know those of the commands."""
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        if isinstance(self.parser, FedStopParser) and add_subcommands:
            self.parser.commands = self._subcommand_parsers

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Build a command's parser, empty for other commands: each takes a tenth of a second."""
        if self._command in (None, subcommand):
            return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        self._subcommand_method_arguments[subcommand] = []
        return self.init_parser(**kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Methods of the loop that are commands, with the arguments built from the configuration."""
        return {name: {"model", "datamodule"} for name in ("fit", "validate", "test")}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the loop, the model and the data."""
        # `add_lightning_class_args` takes subclasses of `Trainer` alone.
        parser.add_class_arguments(self.trainer_class, "trainer", instantiate=False, sub_configs=True)
        parser.set_defaults({f"trainer.{k}": v for k, v in self.trainer_defaults.items() if k != "callbacks"})
        parser.add_lightning_class_args(self._model_class, "model", subclass_mode=self.subclass_mode_model)
        parser.add_lightning_class_args(self._datamodule_class, "data", subclass_mode=self.subclass_mode_data)
        if self._model_class is LightningModule:
            parser.set_defaults({"model": {"class_path": _import_path(ImageClassifier)}})
        if self._datamodule_class is LightningDataModule:
            parser.set_defaults({"data": {"class_path": _import_path(MedMNIST)}})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link what the data knows to the model."""
        if self.subclass_mode_model and self.subclass_mode_data:
            for name in DATA_LINKS:
                parser.link_arguments(
                    "data", f"model.init_args.{name}", compute_fn=linked_value(self, name), apply_on="instantiate"
                )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments; a class that replaces another starts from its own defaults."""
        if isinstance(args, (dict, Namespace)):
            self.model_is_named = any("model" in part for part in (args, *args.values()) if isinstance(part, dict))
            with self._own_defaults():
                self.config = parser.parse_object(args)
            return
        given = list(sys.argv[1:] if args is None else args)
        self.model_is_named = is_named("model", given, read_configs(given))
        with self._own_defaults():
            self.config = parser.parse_args(given)

    def _own_defaults(self) -> AbstractContextManager[None]:
        return own_defaults(f"{self.parser.prog} {self._command or ''}".strip())

    def _parse_ckpt_path(self) -> None:
        """Take the model's hyperparameters from a checkpoint that names their class.

        Not where a model to train on was named: what differs in the checkpoint is then named on loading, and refused.
        """
        command = self.config.get("subcommand")
        if command == "fit" and self.model_is_named:
            return
        given = self.config.get(f"{command}.ckpt_path")
        ckpt_path = str(local_path(given, "ckpt_path")) if given else ""
        if not os.path.isfile(ckpt_path):
            return
        self.config[f"{command}.ckpt_path"] = ckpt_path  # which Lightning reads as it stands
        if (read_checkpoint(ckpt_path).get("hyper_parameters") or {}).get("_class_path"):
            with self._own_defaults():
                super()._parse_ckpt_path()

    def _add_instantiators(self) -> None:
        self.errors = ErrorKeeper(self)
        for key, base in (("model", self._model_class), ("data", self._datamodule_class)):
            self.parser.add_instantiator(self.errors.wrap(Instantiator(self, key)), base, subclasses=True)
        self.parser.add_instantiator(self.errors.wrap(build_plainly), object, subclasses=True)

    def instantiate_classes(self) -> None:
        """Build data, model, callbacks and loop; a refusal is raised as it is."""
        with self.errors.unwrapped():
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Build the loop."""
        try:
            return super().instantiate_trainer(**kwargs)
        except Exception as error:
            raise at_place(error, "trainer", self.trainer_class.__name__) from None

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        if self.auto_configure_optimizers:
            check_optimizer(self)
        super()._add_configure_optimizers_method_to_model(subcommand)

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if isinstance(seed, int) and not 0 <= seed < 2**32:
            raise ValueError(
                f"seed_everything: must be a whole number from 0 to {2**32 - 1}, true (a random one) or false, "
                f"got {seed}."
            )
        super()._set_seed()


def _import_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
