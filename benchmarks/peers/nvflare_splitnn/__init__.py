"""NVFlare's SplitNN: networked split training of exactly two parties.

`measure` starts it; `job` and `parties` run in NVFlare's environment.
"""
