"""Marks: how a client notices that its privacy ledger is not the newest one.

The server remembers the last mark that each client has sent:

    client                                  server
      | -- Join --------------------------> |
      | <--------- Welcome, mark m1 ------- |   b"" if this client never sent one
      |  m1 is not in the ledger: stop      |   the server keeps m1
      |  m1 is in the ledger: enter m2      |
      | -- LedgerMark m2 -----------------> |   the server remembers m2, on disk, in place of m1
      | -- embeddings --------------------> |
      | -- LedgerMark m3 -----------------> |   after every 32 charges

A client that has charged nothing since m1, because only its connection was lost, makes no m2.

A ledger that was rolled back to a point before m3 does not contain m3, so the client stops when it joins
again. A rollback to a point after the last mark is not detected.
"""

from typing import Protocol

from vafl.protocol.messages import LedgerMark


class MarkMemory(Protocol):
    """Remembers the last mark of each client, beyond the end of the server's process and of the run."""

    def recall(self, client: int) -> bytes:
        """Return the last mark of this client; empty if there is none."""

    def remember(self, message: LedgerMark) -> None:
        """Replace the mark of this client, durably."""


class Marks:
    """Remembers marks in memory: enough for a simulation, which has no ledgers on disk."""

    def __init__(self) -> None:
        self._marks: dict[int, bytes] = {}

    def recall(self, client: int) -> bytes:
        return self._marks.get(client, b"")

    def remember(self, message: LedgerMark) -> None:
        self._marks[message.client] = message.mark
