"""One round: cohort, local training, aggregation."""
