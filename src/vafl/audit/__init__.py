"""Audits: test whether a private client leaks more than its ledger claims, and attack a run."""
