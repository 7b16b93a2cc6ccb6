"""Vectors, means, client states, random streams and processes."""
