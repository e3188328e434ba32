"""Measure what vafl costs, and compare each figure with its target: `python -m benchmarks`."""
