"""A copy of the module with all that trains it, for training that leaves the module as it is."""

from copy import deepcopy
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fedstop.core.parameters import FlatParameters
from lightning_fedstop.federation.local_training import LocalTrainer


def arguments_of_copy(source: LocalTrainer) -> dict[str, Any]:
    """Arguments of a :class:`LocalTrainer` on a copy of the module; its ``call_hook`` is left out.

    Args:
        source: the loop whose module, as it is now, optimizer and collector are copied. The data module and the method
            are shared.

    Raises:
        MisconfigurationException: if the module cannot be copied.
    """
    module = source.module
    loop: Any = module.trainer
    memo: dict[int, Any] = {id(item): item for item in (loop, loop.datamodule) if item is not None}
    try:
        copied, optimizer, collector = deepcopy((module, source.solver.optimizer, source.collector), memo)
    except Exception as error:
        what = str(error).strip().partition("\n")[0].rstrip(".")
        raise MisconfigurationException(
            f"{type(module).__name__} cannot be copied, as training of several clients at once needs it"
            f" ({type(error).__name__}: {what})."
        ) from error
    copied.trainer = loop
    collector.take()
    return {
        "module": copied,
        "method": source.method,
        "parameters": FlatParameters(copied),
        "solver": source.solver.with_copies(copied, optimizer),
        "fabric": source.fabric,
        "transfer": source.transfer.of_copy(copied),
        "collector": collector,
        "settings": source.settings,
    }
