"""Driving a ``LightningModule``: hooks, logged values, batches, optimizer, evaluation."""
