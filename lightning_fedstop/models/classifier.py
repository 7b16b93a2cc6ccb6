"""Image classification with any timm backbone, reported as the paper reports it."""

from pathlib import Path
from threading import Lock
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_fedstop.models._backbone import build_backbone, nearest_size, takes
from lightning_fedstop.models._chance import draws, has_hooks
from lightning_fedstop.utilities.extras import require_extra
from lightning_fedstop.utilities.validate import not_negative, number, positive, whole_number

_RESERVED = {"pretrained", "num_classes", "in_chans", "features_only", "checkpoint_path", "pretrained_cfg_overlay"}
_SIZES_LOCK = Lock()
Batch = tuple[Tensor, Tensor]


class _Sizes(dict[tuple[int, int], tuple[int, int]]):
    """Sizes to which images are resized; the copies of a model share them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Sizes":
        return self


class ImageClassifier(LightningModule):
    """A timm backbone with cross-entropy, trained by SGD whose learning rate decays by a factor each epoch.

    A batch is ``(images, labels)``: floating-point images of shape ``(n, in_chans, height, width)``, normalised by the
    data module's ``on_after_batch_transfer``, and integer labels of shape ``(n,)`` or ``(n, 1)``.

    Logs ``train_loss``, and for ``val`` and ``test`` the mean loss (``val_loss``), the accuracy (``val_acc``) and the
    F1 score (``val_f1``), the last two as fractions averaged over classes ("macro"), as the paper reports. A class with
    neither a sample nor a prediction is left out of that average.

    Args:
        backbone: Name of a timm model, see ``timm.list_models()``.
        num_classes: Number of classes. The command line takes it from the data module.
        in_chans: Number of image channels. The command line takes it from the data module.
        pretrained: Start from the weights timm publishes, which needs network or a filled cache.
        weights_path: Start from this local file instead: ``.safetensors`` or a PyTorch checkpoint in timm's layout. A
            head of another size is left at random, and other input channels are adapted, as timm does.
        image_size: Side in pixels to which images are resized, bilinearly and on the device. ``None`` keeps their
            size, except that images smaller than the backbone takes (ConvNeXtV2: 32 px) are resized to that size.
        lr: Learning rate of the first epoch, or federated round.
        momentum: SGD momentum.
        weight_decay: SGD weight decay.
        lr_decay: Factor on the learning rate after each epoch, or federated round.
        backbone_kwargs: Further arguments of the timm model, plain values such as ``{"drop_path_rate": 0.1}``.
        matmul_layers: Compute depthwise convolutions on maps of up to 64 pixels as matrix products, and response norms
            as sums: equal up to rounding. ``None`` does so where a ConvNeXt is trained in full precision on a CPU,
            which takes 0.5 to 0.9 times as long; ``True`` on any device, and for any backbone with such layers;
            ``False`` never.
        channels_last: Give the backbone images in channels-last order: no gain beyond noise for ConvNeXtV2 at 32 px.

    A checkpoint holds all weights, so ``ImageClassifier.load_from_checkpoint(path)`` reads no other file and needs no
    network, whatever ``pretrained`` and ``weights_path`` were: ``hparams`` keeps them switched off, while
    ``hparams_initial``, which is what loggers receive, keeps what was given.

    Raises:
        ValueError: If an argument is out of range, the backbone unknown, the weights in ``weights_path`` not for it, or
            ``image_size`` smaller than it takes.
        TypeError: If ``backbone_kwargs`` are not plain values or not arguments of the backbone.
        FileNotFoundError: If ``weights_path`` is not a file.
        RuntimeError: If the pretrained weights cannot be fetched.

    >>> import torch
    >>> model = ImageClassifier("convnextv2_atto", num_classes=10, in_chans=1)
    >>> model(torch.zeros(2, 1, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        backbone: str = "convnextv2_nano",
        num_classes: int | None = None,
        in_chans: int = 3,
        pretrained: bool = False,
        weights_path: str | Path | None = None,
        image_size: int | None = None,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 1e-3,
        lr_decay: float = 0.998,
        backbone_kwargs: dict[str, Any] | None = None,
        matmul_layers: bool | None = None,
        channels_last: bool = False,
    ) -> None:
        require_extra("timm", "images", "`ImageClassifier`")
        super().__init__()
        if num_classes is None:
            raise ValueError("`num_classes` is missing: give the number of classes, at least 2.")
        num_classes = whole_number("num_classes", num_classes, 2)
        in_chans = whole_number("in_chans", in_chans, 1)
        if image_size is not None:
            image_size = whole_number("image_size", image_size, 1)
        _check_rates(lr, momentum, weight_decay, lr_decay)
        _check_plain("backbone_kwargs", backbone_kwargs)
        if reserved := sorted(_RESERVED.intersection(backbone_kwargs or {})):
            raise ValueError(f"`backbone_kwargs` cannot hold {', '.join(reserved)}: other arguments set them.")
        self.save_hyperparameters()
        self.hparams.update(
            num_classes=num_classes, in_chans=in_chans, image_size=image_size, pretrained=False, weights_path=None
        )
        self.image_size = image_size
        self.backbone = build_backbone(
            backbone, num_classes, in_chans, pretrained, weights_path, dict(backbone_kwargs or {})
        )
        if matmul_layers or (matmul_layers is None and "convnext" in backbone):
            from lightning_fedstop.models.fast_layers import use_fast_layers  # which needs timm

            exchanged = use_fast_layers(self.backbone, everywhere=bool(matmul_layers))
            if matmul_layers and not exchanged:
                raise ValueError(f"`matmul_layers`: {backbone} has no depthwise convolution that could be a product.")
        if image_size is not None and not takes(self.backbone, in_chans, image_size, image_size):
            needed = nearest_size(self.backbone, in_chans, image_size, image_size)[0]
            bound = f">= {needed}" if takes(self.backbone, in_chans, 2 * needed, 2 * needed) else str(needed)
            raise ValueError(f"`image_size={image_size}`: {backbone} needs {bound} px.")
        self._sizes = _Sizes()
        self.val_metrics = _metrics(num_classes, "val_")
        self.test_metrics = _metrics(num_classes, "test_")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over weights of linear layers as those of convolutions of one pixel, and the other way round."""
        own, given = self.state_dict(), checkpoint["state_dict"]
        for key in own.keys() & given.keys():
            if given[key].squeeze().shape == own[key].squeeze().shape:
                given[key] = given[key].reshape(own[key].shape)

    @property
    def is_thread_safe(self) -> bool:
        """Several threads may each train a copy: nothing in it draws random numbers or has hooks."""
        return not any(draws(m) or has_hooks(m) for m in self.modules())

    def setup(self, stage: str) -> None:
        """Refuse data of more classes, or other channels, than the model has.

        Raises:
            ValueError: With both numbers.
        """
        data = getattr(self.trainer, "datamodule", None)
        count, known = self.hparams["num_classes"], getattr(data, "num_classes", None)
        if isinstance(known, int) and known > count:
            raise ValueError(f"`num_classes` must be at least {known}, the classes of the data, got {count}.")
        count, known = self.hparams["in_chans"], getattr(data, "in_chans", None)
        if isinstance(known, int) and known != count:
            raise ValueError(f"`in_chans` must be {known}, the channels of the data's images, got {count}.")

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape ``(n, num_classes)`` for images of shape ``(n, in_chans, height, width)``.

        Raises:
            TypeError: If the images are integers.
            ValueError: If they have another number of dimensions or channels.
        """
        in_chans = self.hparams["in_chans"]
        if not images.is_floating_point():
            raise TypeError(
                f"ImageClassifier takes floating-point images, got {images.dtype}: the data module's "
                "`on_after_batch_transfer` makes them so (2 * pixel / 255 - 1); call it before the model."
            )
        if images.ndim != 4 or images.shape[1] != in_chans:
            raise ValueError(
                f"ImageClassifier takes images of shape (n, {in_chans}, height, width), got {tuple(images.shape)}; "
                "the channels are the argument `in_chans`."
            )
        images = self._resize(images)
        if self.hparams["channels_last"]:
            from lightning_fedstop.models.fast_layers import is_transformed

            # Under `torch.func` the first dimension that is seen is not the first one in memory.
            if not is_transformed():
                images = images.contiguous(memory_format=torch.channels_last)
        logits: Tensor = self.backbone(images)
        return logits

    def _resize(self, images: Tensor) -> Tensor:
        given = (images.shape[2], images.shape[3])
        size = self._sizes.get(given)
        if size is None:
            with _SIZES_LOCK:  # Threads that train copies ask at the same time.
                size = self._sizes[given] = self._sizes.get(given) or self._size_for(given)
        if size == given:
            return images
        return F.interpolate(images, size, mode="bilinear", antialias=size[0] < given[0] or size[1] < given[1])

    def _size_for(self, given: tuple[int, int]) -> tuple[int, int]:
        if self.image_size is not None:
            return self.image_size, self.image_size
        name = self.hparams["backbone"]
        try:
            size = nearest_size(self.backbone, self.hparams["in_chans"], *given)
        except ValueError as error:
            raise ValueError(f"`backbone={name}`, images of {given[0]} x {given[1]} px: {error}") from None
        if size != given:
            rank_zero_info(
                f"Images of {given[0]} x {given[1]} px are resized to {size[0]} x {size[1]} px on the device, which is "
                f"what {name} needs."
            )
        return size

    def per_sample_loss(self, batch: Batch) -> Tensor:
        """Cross-entropy of each sample of a batch, shape ``(n,)``."""
        images, labels = batch
        return F.cross_entropy(self(images), _class_ids(labels), reduction="none")

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Tensor:
        """Mean cross-entropy of a batch."""
        loss = self.per_sample_loss(batch).mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(batch[1]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int = 0) -> None:
        """Add a batch to the validation figures."""
        self._evaluate("val", self.val_metrics, batch)

    def test_step(self, batch: Batch, batch_idx: int = 0) -> None:
        """Add a batch to the test figures."""
        self._evaluate("test", self.test_metrics, batch)

    def _evaluate(self, stage: str, metrics: MetricCollection, batch: Batch) -> None:
        images, labels = batch
        labels = _class_ids(labels)
        logits = self(images)
        metrics.update(logits, labels)
        loss = F.cross_entropy(logits, labels)
        self.log(f"{stage}_loss", loss, prog_bar=True, batch_size=len(labels), sync_dist=True)

    def on_validation_epoch_start(self) -> None:
        """Reset the figures, also after an evaluation that was broken off."""
        self.val_metrics.reset()

    def on_validation_epoch_end(self) -> None:
        """Log the validation figures of all batches."""
        self.log_dict(self.val_metrics.compute(), prog_bar=True)

    def on_test_epoch_start(self) -> None:
        """Reset the figures, also after an evaluation that was broken off."""
        self.test_metrics.reset()

    def on_test_epoch_end(self) -> None:
        """Log the test figures of all batches."""
        self.log_dict(self.test_metrics.compute(), prog_bar=True)

    def configure_optimizers(self) -> tuple[list[Optimizer], list[LRScheduler]]:
        """SGD over the trainable parameters, its learning rate multiplied by ``lr_decay`` after each epoch."""
        rates = self.hparams
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = SGD(trainable, rates["lr"], momentum=rates["momentum"], weight_decay=rates["weight_decay"])
        return [optimizer], [ExponentialLR(optimizer, gamma=rates["lr_decay"])]


def _metrics(num_classes: int, prefix: str) -> MetricCollection:
    # `validate_args` would look at the values of each batch, which makes the device wait for the host.
    metrics: dict[str, Metric | MetricCollection] = {
        "acc": MulticlassAccuracy(num_classes, average="macro", validate_args=False),
        "f1": MulticlassF1Score(num_classes, average="macro", validate_args=False),
    }
    return MetricCollection(metrics, prefix=prefix, compute_groups=[["acc", "f1"]])


def _class_ids(labels: Tensor) -> Tensor:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.is_floating_point():
        raise ValueError(
            f"ImageClassifier takes one class number per image, integers of shape (n,) or (n, 1), got {labels.dtype} "
            f"of shape {tuple(labels.shape)}."
        )
    return labels.long()


def _check_rates(lr: float, momentum: float, weight_decay: float, lr_decay: float) -> None:
    positive("lr", lr)
    number("momentum", momentum, "a number in [0, 1)", lambda value: 0 <= value < 1)
    not_negative("weight_decay", weight_decay)
    number("lr_decay", lr_decay, "a number in (0, 1]", lambda value: 0 < value <= 1)


def _check_plain(name: str, value: Any) -> None:
    """Checkpoints are read with ``weights_only=True``, which takes plain values only."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_plain(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_plain(name, inner)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(f"`{name}` must be a plain value, which a checkpoint can hold, got {type(value).__name__}.")
