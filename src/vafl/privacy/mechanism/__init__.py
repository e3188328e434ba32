"""Clip and noise what leaves a client."""
