"""Run a federation in one process on a virtual clock."""
