"""The clients of a round as one stack; experimental until measured on an accelerator."""
