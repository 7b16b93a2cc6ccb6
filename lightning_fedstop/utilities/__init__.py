"""Validation, files, accelerators and the environment."""
