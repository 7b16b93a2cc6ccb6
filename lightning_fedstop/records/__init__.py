"""What a run leaves behind, and how to read it.

The public names are imported when they are first used: writing a record needs Lightning, reading one does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fedstop.records.reader import Record, find_records, read_record, read_records
    from lightning_fedstop.records.replay import RULES, Stop, replay_table
    from lightning_fedstop.records.run_record import RunRecord, read_rounds

__all__ = [
    "RULES",
    "Record",
    "RunRecord",
    "Stop",
    "find_records",
    "read_record",
    "read_records",
    "read_rounds",
    "replay_table",
]

_HOMES = {
    "reader": ("Record", "find_records", "read_record", "read_records"),
    "replay": ("RULES", "Stop", "replay_table"),
    "run_record": ("RunRecord", "read_rounds"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
