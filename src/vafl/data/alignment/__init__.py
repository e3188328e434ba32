"""Private set intersection by elliptic-curve Diffie-Hellman: the arithmetic, without any I/O.

docs/alignment.md has the protocol, what each party learns, and why it learns no more.
"""
