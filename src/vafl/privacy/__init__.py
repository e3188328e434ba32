"""Differential privacy for clients: modes, settings, noise mechanisms, the ledger, and the analysis."""
