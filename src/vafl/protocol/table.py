"""The server's memory: the last embedding of every row and client, and how old each one is.

A cell's delay is counted in global iterations by the paper's equation (3): a cell stored for
iteration k has delay 0 in that step, 1 in the next, and so on. The table keeps the iteration of
storing, so nothing has to be counted up: delay = iteration - stored_at.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vafl.errors import ConfigError, InvalidMessage

FOREVER = 2**30  # a delay at or above this means: never uploaded
_EXACT_CHANGE = 2.0**20  # beyond it float64 no longer remembers the small embeddings beside a large one
Delays = npt.NDArray[np.int32]


class EmbeddingTable:
    """H[row, client], one contiguous line a row, and the delay of each cell.

    Args:
        rows: number of records N.
        widths: embedding width of each client.
        summed: keep the running sum S[row] of the clients' embeddings, for heads that see nothing
            else. A read then costs the same for 4 or 40 clients. The sum is kept in float64, so that
            adding and removing float32 embeddings for ever does not drift.
        cells, stored_at: memory that lasts longer than the process, with what it holds already.
    """

    def __init__(
        self,
        rows: int,
        widths: Sequence[int],
        *,
        summed: bool,
        cells: Tensor | None = None,
        stored_at: Delays | None = None,
    ) -> None:
        if summed and len(set(widths)) > 1:
            raise ConfigError(
                f"a head on the sum needs embeddings of one width. Found {list(widths)}. "
                'Give every client the same width, or use combine = "concat".'
            )
        ends = np.cumsum(widths).tolist()
        self.rows = rows
        self.widths = tuple(widths)
        self.cells = torch.zeros(rows, ends[-1]) if cells is None else cells
        empty = np.full((rows, len(widths)), -FOREVER, dtype=np.int32) if stored_at is None else stored_at
        self.stored_at: Delays = empty
        self.sums = torch.zeros(rows, widths[0], dtype=torch.float64) if summed else None
        if self.sums is not None and cells is not None:
            for end in ends:
                self.sums += cells[:, end - widths[0] : end]
        self.columns = tuple(slice(end - width, end) for end, width in zip(ends, widths, strict=True))
        self._views = tuple(self.cells[:, column] for column in self.columns)
        self._seen = np.empty(rows, dtype=np.int32)

    @property
    def clients(self) -> int:
        return len(self.widths)

    @property
    def nbytes(self) -> int:
        sums = 0 if self.sums is None else self.sums.nbytes
        return self.cells.nbytes + self.stored_at.nbytes + sums

    def check(self, client: int, rows: Tensor, embeddings: Tensor) -> None:
        """Raises InvalidMessage unless `store` may take these; changes nothing."""
        numbers = rows.numpy()
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < self.rows):
            raise InvalidMessage(
                f"rows must be in 0..{self.rows - 1}. Found {numbers.min()}..{numbers.max()}."
            )
        if embeddings.shape[1] != self.widths[client]:
            raise InvalidMessage(
                f"embeddings of client {client} must be {self.widths[client]} wide. "
                f"Found {embeddings.shape[1]}."
            )
        order = np.arange(len(numbers), dtype=np.int32)
        self._seen[numbers] = order  # scratch: a row named twice keeps only its last position
        if not np.array_equal(self._seen[numbers], order):
            raise InvalidMessage("rows must be distinct. Found a row named twice in one message.")

    def store(self, client: int, rows: Tensor, embeddings: Tensor, iteration: int) -> None:
        """Replaces the cells of `client` at distinct `rows`: fresh for step `iteration`."""
        view = self._views[client]
        if self.sums is None:
            view.index_copy_(0, rows, embeddings)
        else:
            change = embeddings.double().sub_(view.index_select(0, rows))
            view.index_copy_(0, rows, embeddings)
            self._add(self.sums, rows, change)
        self.stored_at[rows.numpy(), client] = iteration

    def _add(self, sums: Tensor, rows: Tensor, change: Tensor) -> None:
        """S[row] += change; summed anew where something huge came or went and took digits with it."""
        flat = change.view(-1)
        if float(flat.dot(flat)) < _EXACT_CHANGE**2:
            sums.index_add_(0, rows, change)
        else:
            cells = self.cells.index_select(0, rows).view(len(rows), self.clients, -1)
            sums.index_copy_(0, rows, cells.sum(1, dtype=torch.float64))

    def stored_after(self, client: int, iteration: int) -> Tensor:
        """The rows of this client's cells that are newer than step `iteration`."""
        return torch.from_numpy(np.flatnonzero(self.stored_at[:, client] > iteration))

    def forget_after(self, iteration: int) -> None:
        """Cells newer than step `iteration` count as never stored: the table goes back to a checkpoint."""
        self.stored_at[self.stored_at > iteration] = -FOREVER

    def read(self, rows: Tensor) -> Tensor:
        """What the head sees of these rows: [batch, width] of sums, or [batch, all widths]."""
        if self.sums is not None:
            return self.sums.index_select(0, rows).float()
        return self.cells.index_select(0, rows)

    def delays(self, rows: Tensor, iteration: int) -> Delays:
        """[batch, clients]: the delay of each cell at step `iteration`; FOREVER or more if never stored."""
        stored_at: Delays = self.stored_at.take(rows.numpy(), axis=0)
        return np.subtract(np.int32(iteration), stored_at, out=stored_at)
