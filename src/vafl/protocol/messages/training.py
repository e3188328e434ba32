"""The messages of training and evaluation: embeddings up, gradients down, requests for more embeddings."""

from dataclasses import dataclass

from vafl.arrays import Matrix, RowIds
from vafl.protocol.messages.checks import (
    require_counts,
    require_group,
    require_matrix,
    require_rows,
    require_some,
    require_window,
)


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
    rows: RowIds
    embeddings: Matrix
    answer: bool = True
    in_flight: int = 0

    def __post_init__(self) -> None:
        require_counts(sequence=self.sequence, activation=self.activation - self.in_flight)
        require_window(self.in_flight)
        require_rows(self.rows)
        require_matrix("embeddings", self.embeddings, self.rows.size)
        require_some(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Refresh:
    """Embeddings of rows that no step is owed for: stored, not answered.

    Attributes:
        request: the number of the `Request` or `Evaluate` that this answers; None if the server did not ask.
        in_flight: as for `Upload`.
    """

    client: int
    sequence: int
    rows: RowIds
    embeddings: Matrix
    request: int | None = None
    in_flight: int = 0

    def __post_init__(self) -> None:
        require_counts(sequence=self.sequence)
        require_window(self.in_flight)
        require_rows(self.rows)
        require_matrix("embeddings", self.embeddings, self.rows.size)


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """Asks for the gradient of an earlier upload, made with `answer=False`."""

    client: int
    sequence: int
    activation: int

    def __post_init__(self) -> None:
        require_counts(sequence=self.sequence, activation=self.activation)


@dataclass(frozen=True, slots=True, eq=False)
class Decline:
    """Client `client` cannot give what a `Request` or `Evaluate` asks for, and says why."""

    client: int
    sequence: int
    request: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
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
        refreshed: the sequence number of the last `Refresh` that the server has stored, if it has stored one
            since the last answer to this client and had not requested it; otherwise -1.
        stored: `activations` at the moment when it was stored; empty without one.
    """

    client: int
    activation: int
    iteration: int
    gradients: Matrix
    activations: tuple[int, ...]
    refreshed: int = -1
    stored: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_matrix("gradients", self.gradients)


@dataclass(frozen=True, slots=True, eq=False)
class Skipped:
    """No step was made for this upload, and why; the client goes on with its next activation."""

    client: int
    activation: int
    iteration: int
    activations: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Ask for fresh embeddings of training rows (delay bound, recovery), or of records to predict.

    Attributes:
        permute: a group of features that the client named when it joined, or "*" for all its features. The
            client permutes these features among the rows before it embeds them. Empty permutes nothing.
    """

    client: int
    number: int
    rows: RowIds
    permute: str = ""

    def __post_init__(self) -> None:
        require_counts(number=self.number)
        require_rows(self.rows)
        if self.permute:
            require_group(self.permute.encode(errors="replace"))


@dataclass(frozen=True, slots=True, eq=False)
class Evaluate:
    """Ask for embeddings of held-out rows, made by the model that the client would keep.

    The client answers as it answers a `Request`: with a `Refresh`, or with a `Decline`. `Evaluate` and
    `Request` share one sequence of numbers.

    Attributes:
        best: how many evaluations were the best so far, in a run that ends with its best models; -1 in other
            runs. If the count has grown since the client's last evaluation, that evaluation was the best.
        restore: whether training is over and the client must return to its best model before it answers.
    """

    client: int
    number: int
    rows: RowIds
    best: int = -1
    restore: bool = False

    def __post_init__(self) -> None:
        require_counts(number=self.number, best=self.best + 1)
        require_rows(self.rows)
