"""What training is made of: embeddings up, gradients down, and requests for more embeddings."""

from dataclasses import dataclass

from vafl.errors import InvalidMessage
from vafl.protocol.messages.checks import (
    HEADER_BYTES,
    ROW_BYTES,
    Explained,
    require_counts,
    require_group,
    require_matrix,
    require_rows,
    require_some,
    require_window,
)
from vafl.protocol.rows import Matrix, Rows


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
    rows: Rows
    embeddings: Matrix
    answer: bool = True
    in_flight: int = 0

    def __post_init__(self) -> None:
        require_counts(sequence=self.sequence, activation=self.activation - self.in_flight)
        require_window(self.in_flight)
        require_rows(self.rows)
        require_matrix("embeddings", self.embeddings, self.rows.size)
        require_some(self.rows)

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + ROW_BYTES * self.rows.size + self.embeddings.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Refresh:
    """Embeddings of rows that no step is owed for: stored, not answered.

    Attributes:
        request: the number of the `Request` this answers; None when the client refreshes by itself.
        in_flight: as for `Upload`.
    """

    client: int
    sequence: int
    rows: Rows
    embeddings: Matrix
    request: int | None = None
    in_flight: int = 0

    def __post_init__(self) -> None:
        require_counts(sequence=self.sequence)
        require_window(self.in_flight)
        require_rows(self.rows)
        require_matrix("embeddings", self.embeddings, self.rows.size)

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + ROW_BYTES * self.rows.size + self.embeddings.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """Asks for the gradient of an earlier upload, made with `answer=False`."""

    client: int
    sequence: int
    activation: int
    nbytes = HEADER_BYTES

    def __post_init__(self) -> None:
        require_counts(sequence=self.sequence, activation=self.activation)


@dataclass(frozen=True, slots=True, eq=False)
class Decline(Explained):
    """Client `client` cannot give what `request` asks for, and says why."""

    client: int
    sequence: int
    request: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Finished(Explained):
    """Client `client` makes no more uploads, and says why; it still answers requests where it can."""

    client: int
    sequence: int
    reason: str


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
    gradients: Matrix
    activations: tuple[int, ...]

    def __post_init__(self) -> None:
        require_matrix("gradients", self.gradients)

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
    """Ask for fresh embeddings of rows, for the delay bound, an evaluation, a recovery or a prediction.

    Attributes:
        best: in evaluations of a run that ends with its best models: how many were the best so far. It has
            grown since the last one if that was, as far as this client took part. -1: nothing is kept.
        back: the run is over: by the model of the best evaluation, please.
        permute: a group of features that the client named when it joined, or "*" for all its features. The
            client permutes these features among the rows before it embeds them. Empty permutes nothing.
    """

    client: int
    number: int
    rows: Rows
    best: int = -1
    back: bool = False
    permute: str = ""

    def __post_init__(self) -> None:
        require_counts(number=self.number, best=self.best + 1)
        require_rows(self.rows)
        if self.permute:
            require_group(self.permute.encode(errors="replace"))
            if self.best >= 0 or self.back:
                raise InvalidMessage(
                    "VFL-4041", "features are permuted for predictions. Found it in an evaluation."
                )

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + ROW_BYTES * self.rows.size + len(self.permute.encode())
