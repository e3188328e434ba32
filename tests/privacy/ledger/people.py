"""Ledgers with a few people in them."""

import polars as pl

from vafl.privacy.ledger.ledger import Ledger
from vafl.privacy.ledger.spender import Spender
from vafl.privacy.settings import PrivacySettings

FIVE = ("ann", "bob", "cleo", "dan", "eve")


def opened(path, people=FIVE, run="run", identity="set", settings=None):
    """Return a ledger in which a run has begun, and the accounts of its rows."""
    ledger = Ledger(path, identity)
    spender = Spender(run, "training", ("own", "other"), settings or PrivacySettings(neighbours="zero_out"))
    return ledger, ledger.begin(spender, pl.Series("id", people, pl.String))
