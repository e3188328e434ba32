"""Budgets for tests that are not about ledgers."""


class NoMarks:
    """The part of a budget that is about marks, of a client without a ledger on disk."""

    def recognise(self, mark):
        pass

    def due_mark(self):
        return b""
