"""The criteria: pure decisions that import neither Lightning nor torch."""
