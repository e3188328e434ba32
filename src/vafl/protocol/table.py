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
from vafl.protocol.rows import Array, Matrix, Rows, check_rows

FOREVER = 2**30  # a delay at or above this means: never uploaded, or lost
_LOST = -FOREVER - 1  # stands for when a cell was stored, if a crash made it worthless
_LARGEST_EXACT = 2.0**20  # beyond it float64 no longer remembers the small embeddings beside a large one
Delays = npt.NDArray[np.int32]


class EmbeddingTable:
    """H[row, client], and the delay of each cell.

    Args:
        rows: number of records N.
        widths: embedding width of each client.
        summed: keep the running sum S[row] of the clients' embeddings, for heads that see nothing
            else. A read then costs the same for 4 or 40 clients. The sum is kept in float64, so that
            adding and removing float32 embeddings for ever does not drift.
        memory: of shape `memory_shape`, with what it holds already; it may outlast the process.
        stored_at: likewise, [rows, clients].

    Attributes:
        cells: [rows, all widths], in memory row after row as they are read; if summed
            [rows, clients, width], in memory client after client as they are written.
        stored_at: [rows, clients], the iteration each cell was stored for.
        sums: [rows, width], or None.
        columns: where each client's embedding stands in a row that is not summed.
    """

    def __init__(
        self,
        rows: int,
        widths: Sequence[int],
        *,
        summed: bool,
        memory: Matrix | None = None,
        stored_at: Delays | None = None,
    ) -> None:
        if summed and len(set(widths)) > 1:
            raise ConfigError(
                f"a head on the sum needs embeddings of one width. Found {list(widths)}. "
                'Give every client the same width, or use combine = "concat".'
            )
        ends = np.cumsum(widths).tolist()
        self.rows, self.widths = rows, tuple(widths)
        self.columns = tuple(slice(end - width, end) for end, width in zip(ends, widths, strict=True))
        fresh = np.full((rows, len(widths)), -FOREVER, dtype=np.int32) if stored_at is None else stored_at
        self.stored_at: Delays = fresh
        shape = self.memory_shape(rows, widths, summed=summed)
        self._held = np.zeros(shape, np.float32) if memory is None else memory
        self.sums = np.zeros((rows, widths[0])) if summed else None
        if summed:
            self._views = list(self._held)
            np.sum(self._held, axis=0, dtype=np.float64, out=self.sums)
        else:
            self._views = [self._held[:, column] for column in self.columns]
        self._stored_at = [fresh[:, client] for client in range(len(widths))]
        self.cells: Array = self._held.swapaxes(0, 1) if summed else self._held

    @staticmethod
    def memory_shape(rows: int, widths: Sequence[int], *, summed: bool) -> tuple[int, ...]:
        """The shape of the memory the cells lie in."""
        return (len(widths), rows, widths[0]) if summed else (rows, sum(widths))

    @property
    def clients(self) -> int:
        return len(self.widths)

    @property
    def nbytes(self) -> int:
        sums = 0 if self.sums is None else self.sums.nbytes
        return self.cells.nbytes + self.stored_at.nbytes + sums

    def check(self, client: int, rows: Rows, embeddings: Array) -> None:
        """Raises InvalidMessage unless `store` may take these; changes nothing."""
        check_rows(rows, self.rows)
        if embeddings.shape[1] != self.widths[client]:
            raise InvalidMessage(
                f"embeddings of client {client} must be {self.widths[client]} wide. "
                f"Found {embeddings.shape[1]}."
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
            self.sums[rows] = self._held.take(rows, 1).sum(0, dtype=np.float64)

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
            found: Matrix = kernels.gather(self._held, rows)
            return found
        return kernels.gather_sums(self.sums, rows)

    def delays(self, rows: Rows, iteration: int) -> Delays:
        """[batch, clients]: the delay of each cell at step `iteration`; FOREVER or more if never stored."""
        return kernels.gather_delays(self.stored_at, rows, iteration)
