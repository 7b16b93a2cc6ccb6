"""What a run leaves behind, and how to read it."""

from lightning_fedstop.records.run_record import RunRecord, read_rounds

__all__ = ["RunRecord", "read_rounds"]
