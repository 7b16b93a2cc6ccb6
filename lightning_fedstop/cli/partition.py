"""``fedstop partition``: how the clients share the training data of a configuration."""

from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fedstop.cli.fit import FedStopCLI
from lightning_fedstop.data import FederatedDataModule
from lightning_fedstop.data.classes import dealt_classes
from lightning_fedstop.utilities.paths import local_path


class PartitionCLI(FedStopCLI):
    """Reader of a run's configuration that builds its data module alone."""

    def __init__(self, args: list[str]) -> None:
        description = "Print how many samples of which class each client has, and draw a picture of it."
        super().__init__(args, run=False, parser_kwargs={"prog": "fedstop partition", "description": description})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of this command, and those that a saved configuration has."""
        super().add_arguments_to_parser(parser)
        parser.add_argument(
            "--picture",
            type=str | None,
            default="partition.png",
            help="Picture to write (.png, .svg or .pdf), `null` for none; by default in `trainer.default_root_dir`.",
        )
        parser.add_argument("--save", type=str | None, default=None, help="File to save the partition in (.npz).")
        parser.add_argument("--ckpt_path", type=Any, default=None, help="Not used here.")
        parser.add_argument("--verbose", type=Any, default=None, help="Not used here.")

    def instantiate_classes(self) -> None:
        """Build the data module."""
        with self.errors.unwrapped():
            only_data = Namespace(data=self.config.data)  # type: ignore[no-untyped-call]
            self.datamodule = self.parser.instantiate_classes(only_data).data


def main(argv: list[str]) -> None:
    """Print and draw the partition of a configuration, and save it on request."""
    cli = PartitionCLI(argv)
    datamodule = cli.datamodule
    if not isinstance(datamodule, FederatedDataModule):
        raise MisconfigurationException(f"{type(datamodule).__name__} deals no training set to clients.")
    datamodule.prepare_data()
    datamodule.setup("fit")
    partition, names = datamodule.partition, dealt_classes(datamodule)
    labels, count = (datamodule.train_labels, len(names)) if names else (None, None)
    print(partition.describe(labels, count, names))
    picture = cli.config.picture
    if picture is not None:
        if picture == cli.parser.get_default("picture"):
            picture = local_path(cli.config.trainer.default_root_dir or ".", "default_root_dir") / picture
        print(f"Picture: {partition.plot(picture, labels, count, names)}")
    if cli.config.save is not None:
        print(f"Partition: {partition.save(cli.config.save)}")
