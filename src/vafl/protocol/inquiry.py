"""An inquiry of the prediction server: rows that every client is asked for, and the answers so far.

Each cell, a row and a client, has one state:

                 +---------+   Refresh with this row       +----------+
    ask() ------>| AWAITED |------------------------------>| ANSWERED |
                 +---------+                               +----------+
                   |  |  |     Decline, or Refresh without this row
                   |  |  +-------------------------------> DECLINED
                   |  |        Leave, unless the inquiry is patient; give_up() while the client is absent
                   |  +----------------------------------> ABSENT
                   |           give_up() while the client is present; the client is overdue
                   +-------------------------------------> LATE

A state other than AWAITED is final, with one exception: until the inquiry is scored, a late answer still
turns a cell into ANSWERED.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vafl.arrays import Matrix, RowIds, States

STATES = ("answered", "absent", "late", "declined", "awaited")  # states of a cell: a row and a client
ANSWERED, ABSENT, LATE, DECLINED, AWAITED = range(len(STATES))


@dataclass(eq=False)
class Inquiry:
    """Rows that every client is asked for, and the answers so far.

    Attributes:
        rows: [rows], distinct and ascending.
        patient: whether to wait for absent clients, which may come back.
        embeddings: [rows, sum of widths].
        states: [rows, clients], each an index into `STATES`.
        columns: the columns of each client's embedding in `embeddings`.
    """

    rows: RowIds
    patient: bool
    embeddings: Matrix
    states: States
    columns: Sequence[slice]

    @property
    def is_open(self) -> bool:
        """Return whether answers may still arrive."""
        return bool((self.states == AWAITED).any())

    def awaited(self, client: int) -> RowIds:
        """Return the rows that this client has not answered yet."""
        return self.rows.compress(self.states[:, client] == AWAITED)

    def take(self, client: int, rows: RowIds, embeddings: Matrix) -> None:
        """Store embeddings of these rows. Rows outside the inquiry are ignored."""
        places = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        fits = self.rows[places] == rows
        chosen = places[fits]
        self.embeddings[chosen, self.columns[client]] = embeddings[fits]
        self.states[chosen, client] = ANSWERED

    def mark(self, client: int, state: int, rows: RowIds | None = None) -> None:
        """Set the state of the cells of these rows (None: all) that still await this client."""
        awaited = self.states[:, client] == AWAITED
        if rows is not None:
            awaited &= np.isin(self.rows, rows)
        self.states[awaited, client] = state
