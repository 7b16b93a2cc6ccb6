"""Models that the command line builds; any other ``LightningModule`` works as well."""

from lightning_fedstop.models.classifier import ImageClassifier

__all__ = ["ImageClassifier"]
