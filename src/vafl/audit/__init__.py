"""Audits: does a private client leak more than its ledger says? Attacks, and what they find."""
