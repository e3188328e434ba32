"""The VAFL algorithm as pure state machines: no I/O, no clock, no threads, no global random state.

Start with client.py and server.py, whose docstrings have the state diagrams. messages/ has what they
exchange.
"""
