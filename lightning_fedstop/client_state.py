"""Import path kept for saved configurations: :mod:`lightning_fedstop.core.client_states`."""

from lightning_fedstop.core.client_states import ClientStates

__all__ = ["ClientStates"]
