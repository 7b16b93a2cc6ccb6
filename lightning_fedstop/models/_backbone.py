"""Build a timm backbone, read its starting weights, and find the image size it takes."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedstop.utilities.files import reason_unreadable
from lightning_fedstop.utilities.paths import local_path

_CHECKPOINT_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model")
_WRAPPER_PREFIXES = ("_orig_mod.", "module.", "backbone.")


def build_backbone(
    name: str,
    num_classes: int,
    in_chans: int,
    pretrained: bool,
    weights_path: str | Path | None,
    kwargs: dict[str, Any],
) -> nn.Module:
    """Build the timm model ``name``, from random weights, from timm's published ones or from a local file.

    Raises:
        ValueError: If timm has no such model, or the weights in ``weights_path`` are not for it.
        TypeError: If the model does not take ``kwargs``.
        FileNotFoundError: If ``weights_path`` is not a file.
        RuntimeError: If timm's published weights cannot be fetched.
    """
    import timm

    if not timm.is_model(name) or ":" in name:
        near = get_close_matches(name, timm.list_models(), n=5, cutoff=0.5)
        hint = f"close names: {', '.join(near)}" if near else "see `timm.list_models()`"
        raise ValueError(f"`backbone`: timm has no model {name!r}; {hint}.")
    if weights_path is not None:
        return _from_file(name, num_classes, in_chans, local_path(weights_path, "weights_path"), kwargs)
    model = _create(name, num_classes, in_chans, kwargs)
    if pretrained:
        # The plain model above has shown that the arguments are right, so whatever fails here is about the weights.
        try:
            model = timm.create_model(name, pretrained=True, num_classes=num_classes, in_chans=in_chans, **kwargs)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise RuntimeError(
                f"`pretrained=True`: the published weights of {name} could not be fetched ({type(error).__name__}: "
                f"{reason}). Without network, give a local file in timm's layout (.safetensors or .pth) as "
                "`weights_path`."
            ) from None
    return model


def _create(name: str, num_classes: int, in_chans: int, kwargs: dict[str, Any]) -> nn.Module:
    import timm

    try:
        model: nn.Module = timm.create_model(name, num_classes=num_classes, in_chans=in_chans, **kwargs)
    except TypeError as error:
        raise TypeError(f"`backbone_kwargs`: {name} does not take them as they are: {error}.") from None
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ValueError(f"`backbone`: timm could not build {name!r}: {error}.") from None
    return model


def _from_file(name: str, num_classes: int, in_chans: int, path: Path, kwargs: dict[str, Any]) -> nn.Module:
    """Build ``name`` with the weights of a file; a head of another size and other input channels are adapted."""
    import timm

    model = _create(name, num_classes, in_chans, kwargs)
    weights = read_weights(path)
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    heads = _as_tuple(config.get("classifier"))
    overlay: dict[str, Any] = {"state_dict": weights, "custom_load": False}
    stem = next((f"{conv}.weight" for conv in _as_tuple(config.get("first_conv")) if f"{conv}.weight" in weights), None)
    if stem is not None and weights[stem].ndim == 4:
        overlay["input_size"] = (weights[stem].shape[1], *(config.get("input_size") or (3, 224, 224))[1:])
    # timm drops the head of another size, and is then silent about everything else that is missing too. So load into a
    # model with the head that the file has, where each tensor must match, and take over all but the head.
    in_file = next((weights[f"{head}.weight"].shape[0] for head in heads if f"{head}.weight" in weights), None)
    for classes in (config.get("num_classes", 1000), 0) if in_file is None else (in_file,):
        try:
            donor = timm.create_model(
                name,
                pretrained=True,
                num_classes=classes,
                in_chans=in_chans,
                pretrained_cfg_overlay={**overlay, "num_classes": classes},
                **kwargs,
            )
        except (RuntimeError, ValueError, KeyError, AssertionError):
            continue
        same_head = classes == num_classes
        skip = () if same_head else tuple(f"{head}." for head in heads)
        model.load_state_dict({k: v for k, v in donor.state_dict().items() if not k.startswith(skip)}, strict=same_head)
        return model
    own = model.state_dict()
    matching = sum(key in weights and weights[key].shape == value.shape for key, value in own.items())
    raise ValueError(
        f"`weights_path`: {path} does not hold weights of {name} in timm's layout: {matching} of its {len(own)} "
        "tensors match by name and shape."
    )


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a ``.safetensors`` file or of a PyTorch checkpoint, on the CPU.

    Raises:
        FileNotFoundError: If ``path`` is not a file.
        ValueError: If it cannot be read, holds something else than tensors, or a value that is not finite.
    """
    if not path.is_file():
        what = "is a directory, not a file" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"`weights_path`: {path} {what}.")
    try:
        if path.suffix == ".safetensors":
            import safetensors.torch

            content: Any = safetensors.torch.load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"`weights_path`: {path} cannot be read: {reason_unreadable(error)}.") from None
    if isinstance(content, dict):
        content = next((content[key] for key in _CHECKPOINT_KEYS if isinstance(content.get(key), dict)), content)
    weights = {_bare(k): v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, dict) else {}
    if not weights:
        raise ValueError(f"`weights_path`: {path} holds no tensors by name.")
    for key, value in weights.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(f"`weights_path`: {path} holds values that are not finite, in {key!r}.")
    return weights


def _bare(key: str) -> str:
    for prefix in _WRAPPER_PREFIXES:
        key = key.removeprefix(prefix)
    return key


def _as_tuple(names: str | tuple[str, ...] | list[str] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


def takes(model: nn.Module, in_chans: int, height: int, width: int) -> bool:
    """Try whether ``model`` can process one image of this size.

    Neither modes, buffers, gradients nor random generators are changed.
    """
    like = next(model.parameters())
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(like.device.type, enabled=False):
            model(torch.zeros(1, in_chans, height, width, device=like.device, dtype=like.dtype))
    except (RuntimeError, ValueError, AssertionError, IndexError, ZeroDivisionError):
        return False
    finally:
        for module, training in modes:
            module.training = training
    return True


def nearest_size(model: nn.Module, in_chans: int, height: int, width: int) -> tuple[int, int]:
    """The size at which an image of ``height`` x ``width`` pixels is processed.

    That is its own size if ``model`` takes it, else the smallest larger one, else (a model of one fixed size) the size
    of the model's own configuration.

    Raises:
        ValueError: If no such size is found.
    """
    if takes(model, in_chans, height, width):
        return height, width
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    own = int((config.get("input_size") or (3, 224, 224))[-1])
    shorter = min(height, width)
    for side in [*range(shorter + 1, max(own, shorter) + 1), own]:
        for size in dict.fromkeys([(max(height, side), max(width, side)), (side, side)]):
            if takes(model, in_chans, *size):
                return size
    raise ValueError(f"no image size up to {max(own, shorter)} px was found that the backbone takes.")
