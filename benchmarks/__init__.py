"""Measures speed and memory as ratios, side by side; ``python -m benchmarks --help`` lists what there is."""
