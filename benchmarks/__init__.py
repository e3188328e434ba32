"""What vafl costs, measured: every figure beside its target. `python -m benchmarks` runs them all."""
