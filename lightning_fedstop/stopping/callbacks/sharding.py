"""Refuses parameters of which a process holds only a part."""

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn.parameter import is_lazy

_SHARDING_STRATEGIES = {"FSDPStrategy", "ModelParallelStrategy", "XLAFSDPStrategy"}


def refuse_sharding(trainer: pl.Trainer) -> None:
    """Refuse a strategy that shards parameters.

    Raises:
        MisconfigurationException: naming it.
    """
    strategy = trainer.strategy
    # By name, because Trainer, Fabric and `pytorch_lightning` have a class each.
    names = {cls.__name__ for cls in type(strategy).__mro__}
    if names & _SHARDING_STRATEGIES or getattr(strategy, "zero_stage_3", False):
        raise _sharded(type(strategy).__name__)


def refuse_shards(pl_module: pl.LightningModule) -> None:
    """Refuse parameters that are sharded, or have no shape yet.

    Raises:
        MisconfigurationException: naming the first.
    """
    for name, parameter in pl_module.named_parameters():
        if is_lazy(parameter):
            raise MisconfigurationException(
                f"`TaskVectorEarlyStopping` copies the starting weights, but {name} has no shape yet; "
                "run one batch through lazy layers before the fit."
            )
        # DTensor (FSDP2, tensor parallel) and DeepSpeed's partitioned parameters
        if hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id"):
            raise _sharded(f"the owner of {name}")


def _sharded(owner: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"`TaskVectorEarlyStopping` needs whole parameters, but {owner} keeps a shard of them in each process; "
        "use `strategy='auto'` or `'ddp'`."
    )
