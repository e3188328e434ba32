"""Moves the protocol's messages and supplies time."""
