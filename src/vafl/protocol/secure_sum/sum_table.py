"""The table of a secure sum: one sum per row, since the server learns nothing else."""

import numpy as np

from vafl.arrays import Integers, Iterations, Matrix, RowIds
from vafl.protocol.rows import NO_ROWS
from vafl.protocol.table import FOREVER, EmbeddingTable


class SumTable(EmbeddingTable):
    """The last sum over all clients of each row, as a single column. No client has cells here."""

    def __init__(self, rows: int, clients: int, width: int) -> None:
        super().__init__(rows, [width], summed=True)
        self.clients = clients  # more than the one column

    def lose_since(self, iteration: int, client: int | None = None) -> None:
        """Do nothing: every step sums its rows again, so a crash loses no cells."""

    def lost(self, client: int) -> RowIds:
        """Return no rows: no client has cells here."""
        return NO_ROWS

    def read_filled(self, rows: RowIds) -> tuple[Matrix, dict[int, RowIds]]:
        """Return the sums of these rows, and the rows without a sum for every client.

        Nothing can stand in for one client's part of a sum.
        """
        gap = rows[self.stored_at[rows, 0] == -FOREVER]
        return self.read(rows), dict.fromkeys(range(self.clients), gap) if len(gap) else {}

    def delays(self, rows: RowIds, iteration: int) -> Iterations:
        """Return the delays, [batch, clients]. All parts of a sum have the same delay."""
        return np.repeat(super().delays(rows, iteration), self.clients, axis=1)

    def count_delays(self, rows: RowIds, iteration: int, counts: Integers, own: int) -> int:
        """Count the delays of the sums for every client, since each one takes part in every sum."""
        of_sums = np.zeros_like(counts[:1])
        longest = super().count_delays(rows, iteration, of_sums, own)
        counts += of_sums
        return longest
