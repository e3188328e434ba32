"""Budgets for tests that are not about ledgers."""


class NoMarks:
    """The methods of a budget that concern marks, for a client without a ledger on disk."""

    def recognise(self, mark):
        pass

    def due_mark(self):
        return b""
