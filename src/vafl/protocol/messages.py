"""Everything the parties say to each other: frozen, and checked when made.

What a message says about itself (shapes, types, signs) is checked here; what only the receiver can
know (how many rows there are, whose turn it is) is checked by the receiver. No message carries raw
features or model parameters, and none of these types could.

| client says | server says |
|---|---|
| `Join`; `Leave` (said by the runtime when a client vanished) | `Welcome`, then what is still owed |
| `Upload`: embeddings of a minibatch, at one activation | `Gradient` or `Skipped` |
| `Query`: the gradient for an earlier upload (query-first order) | `Gradient` or `Skipped` |
| `Refresh`: embeddings of other rows, or of the rows asked for | |
| `Decline`: cannot give the rows asked for | `Request`: fresh embeddings of these rows, please |
| `Finished`: makes no more uploads | |
| `Offer`: a fresh key for an epoch of masks | `Rekey`: a new epoch begins; `Keys`: everybody's keys |
| `MaskedUpload`, `MaskedRefresh`: as above, readable only in the sum over all clients | |
| | `Durable`: what a checkpoint now holds of this client |
| | `Refused`: a message broke a rule; `Stop`: the run is over |
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vafl.errors import Diverged, InvalidMessage
from vafl.protocol.settings import LARGEST_WINDOW

HEADER_BYTES = 48  # kind, encoding, sequence, activation, iteration, lengths
LARGEST_OFFER = 4096  # bytes of a key and the proof whose it is
ROW_BYTES = 4  # a row travels as an unsigned 32-bit number
Words = npt.NDArray[np.uint64]


def _rows_fault(rows: Tensor) -> str | None:
    if rows.dtype != torch.int64 or rows.ndim != 1:
        return f"rows must be a vector of int64. Found {rows.dtype} {list(rows.shape)}."
    return None


def _matrix_fault(name: str, matrix: Tensor, count: int | None = None) -> str | None:
    if matrix.dtype != torch.float32 or matrix.ndim != 2:
        return f"{name} must be a float32 matrix [rows, width]. Found {matrix.dtype} {list(matrix.shape)}."
    if count is not None and matrix.shape[0] != count:
        return f"{name} must have one line a row, {count}. Found {matrix.shape[0]}."
    values = matrix.numpy().ravel("K")
    if not (math.isfinite(np.vdot(values, values)) or np.isfinite(values).all()):  # the first is quick
        return f"{name} must be finite. Found NaN or infinity: a step size too large does that."
    return None


def _words_fault(words: Words, count: int) -> str | None:
    if words.dtype != np.uint64 or words.ndim != 2 or len(words) != count:
        return (
            f"masked scores must be a matrix of uint64 with one line a row, {count}. "
            f"Found {words.dtype} {list(words.shape)}."
        )
    return None


def _offer_fault(offer: bytes) -> str | None:
    if 0 < len(offer) <= LARGEST_OFFER:
        return None
    return f"an offer must have 1 to {LARGEST_OFFER} bytes. Found {len(offer)}."


def _require(*faults: str | None) -> None:
    for fault in faults:
        if fault:
            raise InvalidMessage(fault)


class made_here:  # noqa: N801 - read as: with made_here()
    """Around a message of our own making: what is not finite in it is no fault of the other party."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        if isinstance(fault, InvalidMessage):
            raise Diverged(f"{fault} Lower optimiser.step_size, or scale the features.") from fault


def _window_fault(in_flight: int) -> str | None:
    if 0 <= in_flight <= LARGEST_WINDOW:
        return None
    return f"in_flight must be in 0..{LARGEST_WINDOW}. Found {in_flight}."


def _count_fault(name: str, value: int) -> str | None:
    return f"{name} must be 0 or more. Found {value}." if value < 0 else None


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """Client `client` is here, for the first time or again, and says where it stands.

    Attributes:
        activation: the number of its next upload.
        applied: how many of its uploads were answered; it still waits for those from here on.
        iteration: the last global iteration its model has learned from; -1 if none.
    """

    client: int
    activation: int = 0
    applied: int = 0
    iteration: int = -1
    nbytes = HEADER_BYTES

    def __post_init__(self) -> None:
        _require(
            _count_fault("applied", self.applied),
            _count_fault("activation", self.activation - self.applied),
            _count_fault("iteration", self.iteration + 1),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Leave:
    """Client `client` is gone. What it had uploaded stays in the table."""

    client: int
    nbytes = HEADER_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Upload:
    """Embeddings of the minibatch of one activation; the server steps on these rows.

    Attributes:
        sequence: grows by at least one with each message of this client since it joined.
        activation: which of the client's activations this is, from 0; its batch follows from it.
        rows: [batch] distinct row numbers.
        embeddings: [batch, width].
        answer: whether the server answers with the gradient (Algorithm 1 as written) or the client
            will ask for it at its next activation (the footnote's order).
        in_flight: how many of its earlier uploads were unanswered when the client embedded these rows:
            their gradients are missing from its model, and that counts as delay.
    """

    client: int
    sequence: int
    activation: int
    rows: Tensor
    embeddings: Tensor
    answer: bool = True
    in_flight: int = 0

    def __post_init__(self) -> None:
        _require(
            _count_fault("sequence", self.sequence),
            _count_fault("activation", self.activation - self.in_flight),
            _window_fault(self.in_flight),
            _rows_fault(self.rows),
            _matrix_fault("embeddings", self.embeddings, self.rows.numel()),
            None if self.rows.numel() else "an upload needs at least one row. Found none.",
        )

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + ROW_BYTES * self.rows.numel() + self.embeddings.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Refresh:
    """Embeddings of rows that no step is owed for: stored, not answered.

    Attributes:
        request: the number of the `Request` this answers; None when the client refreshes by itself.
        in_flight: as for `Upload`.
    """

    client: int
    sequence: int
    rows: Tensor
    embeddings: Tensor
    request: int | None = None
    in_flight: int = 0

    def __post_init__(self) -> None:
        _require(
            _count_fault("sequence", self.sequence),
            _window_fault(self.in_flight),
            _rows_fault(self.rows),
            _matrix_fault("embeddings", self.embeddings, self.rows.numel()),
        )

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + ROW_BYTES * self.rows.numel() + self.embeddings.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """Asks for the gradient of an earlier upload, made with `answer=False`."""

    client: int
    sequence: int
    activation: int
    nbytes = HEADER_BYTES

    def __post_init__(self) -> None:
        _require(_count_fault("sequence", self.sequence), _count_fault("activation", self.activation))


@dataclass(frozen=True, slots=True, eq=False)
class Decline:
    """Client `client` cannot give what `request` asks for, and says why."""

    client: int
    sequence: int
    request: int
    reason: str

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + len(self.reason.encode())


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """Client `client` makes no more uploads, and says why; it still answers requests where it can."""

    client: int
    sequence: int
    reason: str

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + len(self.reason.encode())


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A client's public key for one epoch of masks, with the proof whose it is: for the other clients."""

    client: int
    sequence: int
    epoch: int
    offer: bytes

    def __post_init__(self) -> None:
        _require(
            _count_fault("sequence", self.sequence),
            _count_fault("epoch", self.epoch),
            _offer_fault(self.offer),
        )

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + len(self.offer)


@dataclass(frozen=True, slots=True, eq=False)
class MaskedUpload:
    """As `Upload`, but each word is a score under masks that cancel only in the sum over all clients.

    Attributes:
        epoch: whose masks these are.
        words: [batch, width] modulo 2^64.
    """

    client: int
    sequence: int
    epoch: int
    activation: int
    rows: Tensor
    words: Words

    def __post_init__(self) -> None:
        _require(
            _count_fault("sequence", self.sequence),
            _count_fault("epoch", self.epoch),
            _count_fault("activation", self.activation),
            _rows_fault(self.rows),
            _words_fault(self.words, self.rows.numel()),
            None if self.rows.numel() else "an upload needs at least one row. Found none.",
        )

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + ROW_BYTES * self.rows.numel() + self.words.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class MaskedRefresh:
    """As `Refresh`, in answer to `request`, under masks as `MaskedUpload` is."""

    client: int
    sequence: int
    epoch: int
    request: int
    rows: Tensor
    words: Words

    def __post_init__(self) -> None:
        _require(
            _count_fault("sequence", self.sequence),
            _count_fault("epoch", self.epoch),
            _count_fault("request", self.request),
            _rows_fault(self.rows),
            _words_fault(self.words, self.rows.numel()),
        )

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + ROW_BYTES * self.rows.numel() + self.words.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Welcome:
    """Where the run stands.

    Attributes:
        iteration: the global iteration.
        activations: how many uploads of each client the server has; the client says again what it is
            missing, and leaves out what it has.
        durable: how many uploads of this client a checkpoint holds.
        run: the run's random number: models belong together if they were trained in one run.
    """

    client: int
    iteration: int
    activations: tuple[int, ...]
    durable: int = 0
    run: int = 0

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + 8 * len(self.activations)


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """The mean loss's gradient w.r.t. the embeddings of one upload.

    Attributes:
        iteration: the global iteration k whose step this gradient belongs to.
        gradients: [batch, width], in the order of the upload's rows.
        activations: how often each client has been active, for look-ahead refresh.
    """

    client: int
    activation: int
    iteration: int
    gradients: Tensor
    activations: tuple[int, ...]

    def __post_init__(self) -> None:
        _require(_matrix_fault("gradients", self.gradients))

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + self.gradients.nbytes + 8 * len(self.activations)


@dataclass(frozen=True, slots=True, eq=False)
class Skipped:
    """No step was made for this upload, and why; the client goes on with its next activation."""

    client: int
    activation: int
    iteration: int
    activations: tuple[int, ...]
    reason: str

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + 8 * len(self.activations) + len(self.reason.encode())


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Fresh embeddings of these rows, please: the delay bound, an evaluation or a recovery needs them."""

    client: int
    number: int
    rows: Tensor

    def __post_init__(self) -> None:
        _require(_count_fault("number", self.number), _rows_fault(self.rows))

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + ROW_BYTES * self.rows.numel()


@dataclass(frozen=True, slots=True, eq=False)
class Rekey:
    """Masks made so far are void, and why; a fresh key for the new epoch, please."""

    client: int
    epoch: int
    reason: str

    def __post_init__(self) -> None:
        _require(_count_fault("epoch", self.epoch))

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + len(self.reason.encode())


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """What every client has offered for an epoch, in their order: masks can be made."""

    client: int
    epoch: int
    offers: tuple[bytes, ...]

    def __post_init__(self) -> None:
        _require(_count_fault("epoch", self.epoch), *map(_offer_fault, self.offers))

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + sum(8 + len(offer) for offer in self.offers)


@dataclass(frozen=True, slots=True, eq=False)
class Durable:
    """A checkpoint now holds the client's first `activation` uploads: no crash can undo them."""

    client: int
    activation: int
    nbytes = HEADER_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Stop:
    """The run is over, and why."""

    client: int
    reason: str

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + len(self.reason.encode())


@dataclass(frozen=True, slots=True, eq=False)
class Refused:
    """A message of the client broke a rule and was dropped; the reason says which."""

    client: int
    reason: str

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + len(self.reason.encode())


MaskingMessage = Offer | MaskedUpload | MaskedRefresh
ClientMessage = Join | Leave | Upload | Refresh | Query | Decline | Finished | MaskingMessage
ServerMessage = Welcome | Gradient | Skipped | Request | Rekey | Keys | Durable | Stop | Refused
