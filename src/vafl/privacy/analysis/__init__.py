"""Compute the guarantee of given noise, and the noise that a guarantee needs."""
