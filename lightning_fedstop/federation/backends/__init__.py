"""Ways of training a cohort's clients."""
