"""The embedding table: the last embedding of every row and client, and how stale each one is.

The paper's equation (3) counts the delay of a cell in global iterations: a cell stored for iteration k has
delay 0 in that step, 1 in the next, and so on. The table keeps the iteration of storing, so no counter has to
be updated at each step: delay = iteration - stored_at.
"""

from collections.abc import Sequence

import numpy as np

from vafl import kernels
from vafl.arrays import Array, Doubles, Integers, Iterations, Matrix, RowIds
from vafl.errors import ConfigError, InvalidMessage
from vafl.protocol.rows import check_rows, mean_of_rows, slices_of

FOREVER = 2**30  # a delay at or above this means that the cell was never uploaded, or was lost
_LOST = -FOREVER - 1  # the value of stored_at for a cell that was lost in a crash
_LARGEST_EXACT = 2.0**20  # beside a larger value, a float64 sum loses digits of small embeddings
_LINE = 64  # bytes in a cache line
_MENDED_ROWS = 65_536  # rows checked at a time, which bounds memory
_DRIFT = 1e-9  # tolerated rounding error of a sum after many updates, far below the precision of float32


class EmbeddingTable:
    """The embeddings H[row, client], and the delay of each cell.

    Args:
        rows: the number of records N.
        widths: the embedding width of each client.
        summed: keep the running sum S[row] of the clients' embeddings, for heads that only use the sum. A
            read then costs the same for 4 or 40 clients. The sum is float64, so that it does not drift while
            float32 embeddings are added and removed.
        memory: an array of bytes or of `record_type` records to use as the table, with its present content.
            It may be a mapped file, which survives the process. None starts with an empty table.

    Attributes:
        records: the whole table, one record per row.
        cells: [rows, sum of widths]; if summed, [rows, clients, width].
        stored_at: [rows, clients], the iteration that each cell was stored for.
        sums: [rows, width], or None if not summed.
        columns: the slice of each client's embedding in a row of `cells`, if not summed.
        clients: the number of clients.
    """

    def __init__(
        self, rows: int, widths: Sequence[int], *, summed: bool, memory: Array | None = None
    ) -> None:
        if summed and len(set(widths)) > 1:
            raise ConfigError(
                "VFL-4221",
                f"a head on the sum needs embeddings of the same width. Found {list(widths)}. "
                'Give every client the same width, or use combine = "concat".',
            )
        self.rows, self.widths, self.columns = rows, tuple(widths), slices_of(widths)
        self.clients = len(widths)
        kind = record_type(widths, summed=summed)
        self.records: Array = _zeros(rows, kind) if memory is None else np.asarray(memory).view(kind)
        self.stored_at: Iterations = self.records["stored_at"]
        self.cells: Array = self.records["cells"]
        self.sums: Doubles | None = self.records["sums"] if summed else None
        places: Sequence[int | slice] = range(len(widths)) if summed else self.columns
        self._views = [self.cells[:, place] for place in places]
        self._stored_at = [self.stored_at[:, client] for client in range(len(widths))]
        if memory is None:
            self.stored_at[:] = -FOREVER
        elif self.sums is not None:
            self._mend(self.sums)

    def _mend(self, sums: Doubles) -> None:
        """Recompute the sums that do not match their cells.

        A crash can happen after a cell was written and before its sum was. Correct sums are not written: if
        the memory is a mapped file, a write would make the page dirty, and the next checkpoint would write it
        out.
        """
        for begin in range(0, self.rows, _MENDED_ROWS):
            part = slice(begin, begin + _MENDED_ROWS)
            expected = self.cells[part].sum(1, dtype=np.float64)
            wrong = ~np.isclose(sums[part], expected, rtol=_DRIFT, atol=_DRIFT).all(1)
            sums[part][wrong] = expected[wrong]

    @property
    def nbytes(self) -> int:
        return self.records.nbytes

    def check(self, client: int, rows: RowIds, embeddings: Array) -> None:
        """Raise InvalidMessage unless `store` accepts these rows and embeddings."""
        check_rows(rows, self.rows)
        if embeddings.shape[1] != self.widths[client]:
            raise InvalidMessage(
                "VFL-4222",
                f"embeddings of client {client} must have width {self.widths[client]}. "
                f"Found {embeddings.shape[1]}.",
            )

    def store(self, client: int, rows: RowIds, embeddings: Matrix, iteration: int) -> None:
        """Replace the cells of `client` at these distinct rows. Their delay is 0 at step `iteration`."""
        fresh = np.ascontiguousarray(embeddings)
        cells, stored_at = self._views[client], self._stored_at[client]
        if self.sums is None:
            kernels.store(cells, stored_at, rows, fresh, iteration)
        elif not kernels.store_summed(cells, stored_at, rows, fresh, self.sums, iteration, _LARGEST_EXACT):
            # A huge value was added or removed, and rounding cost the sum some digits. Sum the cells again.
            self.sums[rows] = self.cells[rows].sum(1, dtype=np.float64)

    def column(self, client: int) -> Matrix:
        """Return a view of this client's cells, [rows, width]."""
        view: Matrix = self._views[client]
        return view

    def lose_since(self, iteration: int, client: int | None = None) -> None:
        """Mark the cells stored for step `iteration` or later, of one client or of all, as lost.

        They stay lost until they are stored again. The marks are in `stored_at`, so they survive another
        crash.
        """
        stored_at = self.stored_at if client is None else self.stored_at[:, client]
        stored_at[stored_at >= iteration] = _LOST

    def lost(self, client: int) -> RowIds:
        """Return the rows of this client's lost cells."""
        return np.flatnonzero(self.stored_at[:, client] == _LOST)

    def read(self, rows: RowIds) -> Matrix:
        """Return the head's input for these rows: sums [batch, width], or cells [batch, sum of widths]."""
        if self.sums is None:
            inputs: Matrix = kernels.gather(self.cells, rows)
            return inputs
        return kernels.gather_sums(self.sums, rows)

    def read_filled(self, rows: RowIds) -> tuple[Matrix, dict[int, RowIds]]:
        """Return the head's input for these rows, with gaps filled in.

        Where a client has never sent an embedding of a row, use the mean of the embeddings that it has sent,
        or zeros if it has sent none.

        Returns:
            The head's input as in `read`, and for each client with gaps the rows that it has never sent.
        """
        inputs, gaps = self.read(rows), {}
        unsent = self.stored_at[rows] == -FOREVER
        for client in np.flatnonzero(unsent.any(axis=0)).tolist():
            places, known = unsent[:, client], np.flatnonzero(self.stored_at[:, client] != -FOREVER)
            gaps[client] = rows[places]
            stand_in = mean_of_rows(self.column(client), known)
            if self.sums is None:
                inputs[places, self.columns[client]] = stand_in
            else:
                inputs[places] += stand_in
        return inputs, gaps

    def without(self, client: int, rows: RowIds, inputs: Matrix) -> Matrix:
        """Return the head's input for these rows, with one client's embeddings replaced by their mean.

        Args:
            inputs: the head's input with the client's embeddings, as returned by `read`.
        """
        embeddings = self.column(client)[rows]
        mean, changed = embeddings.mean(axis=0, dtype=np.float64).astype(np.float32), inputs.copy()
        if self.sums is None:
            changed[:, self.columns[client]] = mean
        else:
            changed += mean - embeddings
        return changed

    def delays(self, rows: RowIds, iteration: int) -> Iterations:
        """Return each cell's delay at step `iteration`, [batch, clients]; FOREVER or more if not stored."""
        delays: Iterations = np.int32(iteration) - self.stored_at[rows]
        return delays

    def count_delays(self, rows: RowIds, iteration: int, counts: Integers, own: int) -> int:
        """Add the delays of these rows to `counts`, as `kernels.count_delays` does; return the longest."""
        return kernels.count_delays(self.stored_at, rows, counts, iteration, own, FOREVER)


def record_type(widths: Sequence[int], *, summed: bool) -> np.dtype[np.void]:
    """Return the record of one row: its sums, the iterations of storing, its cells; a multiple of 8 bytes.

    All fields of a row are adjacent. In a large table each row is on a different memory page, and the address
    translation takes longer than the read. One record costs one page.
    """
    cells = (len(widths), widths[0]) if summed else (sum(widths),)
    parts = [("sums", "<f8", (widths[0] if summed else 0,)), ("stored_at", "<i4", (len(widths),))]
    return np.dtype([*parts, ("cells", "<f4", cells)], align=True)


def _zeros(rows: int, kind: np.dtype[np.void]) -> Array:
    """Return zeroed records that start at a cache line."""
    memory = np.zeros(rows * kind.itemsize + _LINE, np.uint8)
    begin = -memory.ctypes.data % _LINE
    return memory[begin : begin + rows * kind.itemsize].view(kind)
