"""Experiments in the repository; they are no part of the installed package."""
