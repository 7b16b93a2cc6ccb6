"""The callbacks that ask the criteria."""
