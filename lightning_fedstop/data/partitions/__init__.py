"""Skews, partitions, and their pictures."""
