"""The ways of training a cohort's clients."""
