"""Import path kept for saved configurations: :mod:`lightning_fedstop.federation.cohort`."""

from lightning_fedstop.federation.cohort import Cohort, ScheduledCohort, UniformCohort

__all__ = ["Cohort", "ScheduledCohort", "UniformCohort"]
