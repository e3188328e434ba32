"""Messages about connections, checkpoints and the end of a run."""

from dataclasses import dataclass

from vafl.protocol.messages.checks import (
    require_counts,
    require_groups,
    require_mark,
)


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """Client `client` connects, for the first time or again, and reports where it stands.

    Attributes:
        activation: the number of its next upload.
        applied: how many of its uploads were answered. The uploads `applied`, ..., `activation` - 1 are in
            flight.
        iteration: the last global iteration that its model has stepped on; -1 if none.
        groups: names of the feature groups that the server may ask it to permute, in UTF-8.
    """

    client: int
    activation: int = 0
    applied: int = 0
    iteration: int = -1
    groups: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        in_flight = self.activation - self.applied
        require_counts(applied=self.applied, activation=in_flight, iteration=self.iteration + 1)
        if self.groups:
            require_groups(self.groups)


@dataclass(frozen=True, slots=True, eq=False)
class Leave:
    """The connection of client `client` has ended. Its uploads stay in the table."""

    client: int


@dataclass(frozen=True, slots=True, eq=False)
class Welcome:
    """The server's answer to `Join`: where the run stands.

    Attributes:
        iteration: the global iteration.
        activations: how many uploads of each client the server has. The client sends the later ones again.
        durable: how many uploads of this client a checkpoint holds.
        run: a random number that identifies the run. Models with the same number belong together.
        mark: the last mark of this client's privacy ledger that the server received; empty if none. If the
            ledger does not contain it, the client has another ledger or an outdated one.
    """

    client: int
    iteration: int
    activations: tuple[int, ...]
    durable: int = 0
    run: int = 0
    mark: bytes = b""

    def __post_init__(self) -> None:
        if self.mark:
            require_mark(self.mark)


@dataclass(frozen=True, slots=True, eq=False)
class LedgerMark:
    """A mark that the client has written to its privacy ledger. The server remembers it.

    Marks are random, so the server learns nothing about the ledger from them.
    """

    client: int
    sequence: int
    mark: bytes

    def __post_init__(self) -> None:
        require_counts(sequence=self.sequence)
        require_mark(self.mark)


@dataclass(frozen=True, slots=True, eq=False)
class Durable:
    """A checkpoint holds the client's first `activation` uploads, so no crash can undo them."""

    client: int
    activation: int


@dataclass(frozen=True, slots=True, eq=False)
class Refused:
    """The server dropped a message of the client that broke a rule. The reason names the rule."""

    client: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Stop:
    """The run is over. The reason says why.

    Attributes:
        failed: whether the run ended without a result because the server could not continue.
    """

    client: int
    reason: str
    failed: bool = False
