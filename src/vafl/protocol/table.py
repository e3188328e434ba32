"""The server's memory: the last embedding of every row and client, and how old each one is.

A cell's delay is counted in global iterations by the paper's equation (3): a cell stored for
iteration k has delay 0 in that step, 1 in the next, and so on. The table keeps the iteration of
storing, so nothing has to be counted up: delay = iteration - stored_at.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vafl import kernels
from vafl.errors import ConfigError, InvalidMessage
from vafl.protocol.rows import Array, Matrix, Rows, check_rows, mean_of_rows

FOREVER = 2**30  # a delay at or above this means: never uploaded, or lost
_LOST = -FOREVER - 1  # stands for when a cell was stored, if a crash made it worthless
_LARGEST_EXACT = 2.0**20  # beyond it float64 no longer remembers the small embeddings beside a large one
_LINE = 64  # bytes
_MENDED_ROWS = 65_536  # at a time
_DRIFT = 1e-9  # of a sum that has been kept up for long: far below what float32 shows
Delays = npt.NDArray[np.int32]
Sums = npt.NDArray[np.float64]


class EmbeddingTable:
    """H[row, client], and the delay of each cell.

    Args:
        rows: number of records N.
        widths: embedding width of each client.
        summed: keep the running sum S[row] of the clients' embeddings, for heads that see nothing
            else. A read then costs the same for 4 or 40 clients. The sum is kept in float64, so that
            adding and removing float32 embeddings for ever does not drift.
        memory: bytes, or records as `record_type` has them, with what they hold already; they may outlast
            the process.

    Attributes:
        records: all of the table, one record a row.
        cells: [rows, all widths]; if summed [rows, clients, width].
        stored_at: [rows, clients], the iteration each cell was stored for.
        sums: [rows, width], or None.
        columns: where each client's embedding stands in a row that is not summed.
    """

    def __init__(
        self, rows: int, widths: Sequence[int], *, summed: bool, memory: Array | None = None
    ) -> None:
        if summed and len(set(widths)) > 1:
            raise ConfigError(
                "VFL-4221",
                f"a head on the sum needs embeddings of one width. Found {list(widths)}. "
                'Give every client the same width, or use combine = "concat".',
            )
        ends = np.cumsum(widths).tolist()
        self.rows, self.widths = rows, tuple(widths)
        self.columns = tuple(slice(end - width, end) for end, width in zip(ends, widths, strict=True))
        kind = record_type(widths, summed=summed)
        self.records: Array = _zeros(rows, kind) if memory is None else np.asarray(memory).view(kind)
        self.stored_at: Delays = self.records["stored_at"]
        self.cells: Array = self.records["cells"]
        self.sums: Sums | None = self.records["sums"] if summed else None
        own: Sequence[int | slice] = range(len(widths)) if summed else self.columns
        self._views = [self.cells[:, place] for place in own]
        self._stored_at = [self.stored_at[:, client] for client in range(len(widths))]
        if memory is None:
            self.stored_at[:] = -FOREVER
        elif self.sums is not None:
            self._mend(self.sums)

    def _mend(self, sums: Sums) -> None:
        """A crash may have torn sums and cells apart. What is right is not written again: where memory is a
        file, the next checkpoint would have to write it too."""
        for begin in range(0, self.rows, _MENDED_ROWS):
            part = slice(begin, begin + _MENDED_ROWS)
            right = self.cells[part].sum(1, dtype=np.float64)
            wrong = ~np.isclose(sums[part], right, rtol=_DRIFT, atol=_DRIFT).all(1)
            sums[part][wrong] = right[wrong]

    @property
    def clients(self) -> int:
        return len(self.widths)

    @property
    def nbytes(self) -> int:
        return self.records.nbytes

    def check(self, client: int, rows: Rows, embeddings: Array) -> None:
        """Raises InvalidMessage unless `store` may take these; changes nothing."""
        check_rows(rows, self.rows)
        if embeddings.shape[1] != self.widths[client]:
            raise InvalidMessage(
                "VFL-4222",
                f"embeddings of client {client} must be {self.widths[client]} wide. "
                f"Found {embeddings.shape[1]}.",
            )

    def store(self, client: int, rows: Rows, embeddings: Matrix, iteration: int) -> None:
        """Replaces the cells of `client` at distinct `rows`: fresh for step `iteration`."""
        fresh = np.ascontiguousarray(embeddings)
        cells, stored_at = self._views[client], self._stored_at[client]
        if self.sums is None:
            kernels.store(cells, stored_at, rows, fresh, iteration)
        elif not kernels.store_summed(
            cells, stored_at, rows, fresh, self.sums, iteration, _LARGEST_EXACT
        ):  # summed anew: something huge came or went and took digits with it
            self.sums[rows] = self.cells[rows].sum(1, dtype=np.float64)

    def column(self, client: int) -> Matrix:
        """[rows, width]: this client's cells, as they are."""
        own: Matrix = self._views[client]
        return own

    def lose_since(self, iteration: int, client: int | None = None) -> None:
        """Cells (of one client) stored for step `iteration` or later ones are lost until they are stored
        again; that is kept where `stored_at` is, so it outlasts the next crash."""
        stored_at = self.stored_at if client is None else self.stored_at[:, client]
        stored_at[stored_at >= iteration] = _LOST

    def lost(self, client: int) -> Rows:
        """The rows of this client's cells that are lost."""
        return np.flatnonzero(self.stored_at[:, client] == _LOST)

    def read(self, rows: Rows) -> Matrix:
        """What the head sees of these rows: [batch, width] of sums, or [batch, all widths]."""
        if self.sums is None:
            found: Matrix = kernels.gather(self.cells, rows)
            return found
        return kernels.gather_sums(self.sums, rows)

    def read_filled(self, rows: Rows) -> tuple[Matrix, dict[int, Rows]]:
        """Return what the head sees of these rows, without gaps: where a client has never sent an embedding
        of a row, the mean of those it has sent stands in, or zeros if it has sent none.

        Returns:
            The head's input as `read` gives it, and for each client with gaps the rows it has never sent.
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

    def without(self, client: int, rows: Rows, inputs: Matrix) -> Matrix:
        """Return the head's input of these rows with the client's mean over them in place of its embeddings.

        Args:
            inputs: the input with its embeddings, as `read` gives it.
        """
        own = self.column(client)[rows]
        mean, changed = own.mean(axis=0, dtype=np.float64).astype(np.float32), inputs.copy()
        if self.sums is None:
            changed[:, self.columns[client]] = mean
        else:
            changed += mean - own
        return changed

    def delays(self, rows: Rows, iteration: int) -> Delays:
        """[batch, clients]: the delay of each cell at step `iteration`; FOREVER or more if never stored."""
        return kernels.gather_delays(self.stored_at, rows, iteration)

    def count_delays(self, rows: Rows, iteration: int, counts: Rows, own: int) -> int:
        """Counts the same as `kernels.count_delays` does; gives the longest."""
        return kernels.count_delays(self.stored_at, rows, counts, iteration, own, FOREVER)


def record_type(widths: Sequence[int], *, summed: bool) -> np.dtype[np.void]:
    """One row of a table: its sums, when its cells were stored, its cells; a multiple of 8 bytes.

    What a step needs of a row lies side by side: with many rows each is on a page of memory of its own, and
    to find the page takes longer than to read it.
    """
    cells = (len(widths), widths[0]) if summed else (sum(widths),)
    parts = [("sums", "<f8", (widths[0] if summed else 0,)), ("stored_at", "<i4", (len(widths),))]
    return np.dtype([*parts, ("cells", "<f4", cells)], align=True)


def _zeros(rows: int, kind: np.dtype[np.void]) -> Array:
    """Records that begin where a line of the processor's cache does."""
    memory = np.zeros(rows * kind.itemsize + _LINE, np.uint8)
    begin = -memory.ctypes.data % _LINE
    return memory[begin : begin + rows * kind.itemsize].view(kind)
