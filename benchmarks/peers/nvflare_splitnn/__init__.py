"""NVFlare's SplitNN as a peer: networked split training of exactly two parties.

`measure` runs it from here; `job` and `parties` run inside NVFlare's own environment.
"""
