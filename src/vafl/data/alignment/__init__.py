"""Private set intersection by elliptic-curve Diffie-Hellman: the arithmetic, without any I/O.

docs/alignment.md describes the protocol, what each party learns, and why it learns nothing else.
"""
