"""What is said as a client comes and goes, and as a run ends; and what a crash cannot undo."""

from dataclasses import dataclass

from vafl.protocol.messages.checks import (
    HEADER_BYTES,
    Explained,
    require_counts,
    require_groups,
    require_mark,
)


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """Client `client` is here, for the first time or again, and says where it stands.

    Attributes:
        activation: the number of its next upload.
        applied: how many of its uploads were answered; it still waits for those from here on.
        iteration: the last global iteration its model has learned from; -1 if none.
        groups: names of feature groups that the server may ask it to permute, in UTF-8.
    """

    client: int
    activation: int = 0
    applied: int = 0
    iteration: int = -1
    groups: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        waiting = self.activation - self.applied
        require_counts(applied=self.applied, activation=waiting, iteration=self.iteration + 1)
        if self.groups:
            require_groups(self.groups)

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + sum(8 + len(name) for name in self.groups)


@dataclass(frozen=True, slots=True, eq=False)
class Leave:
    """Client `client` is gone. What it had uploaded stays in the table."""

    client: int
    nbytes = HEADER_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Welcome:
    """Where the run stands.

    Attributes:
        iteration: the global iteration.
        activations: how many uploads of each client the server has; the client says again what it is
            missing, and leaves out what it has.
        durable: how many uploads of this client a checkpoint holds.
        run: the run's random number: models belong together if they were trained in one run.
        mark: the last mark of this client's privacy ledger that the server received; empty if none. A client
            whose ledger does not know it has another ledger, or an older one.
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

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + 8 * len(self.activations) + len(self.mark)


@dataclass(frozen=True, slots=True, eq=False)
class LedgerMark:
    """A mark that the client has just entered in its privacy ledger, for the server to remember.

    Marks are random: the server learns neither what is in the ledger nor how often others got marks.
    """

    client: int
    sequence: int
    mark: bytes

    def __post_init__(self) -> None:
        require_counts(sequence=self.sequence)
        require_mark(self.mark)

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + len(self.mark)


@dataclass(frozen=True, slots=True, eq=False)
class Durable:
    """A checkpoint now holds the client's first `activation` uploads: no crash can undo them."""

    client: int
    activation: int
    nbytes = HEADER_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Refused(Explained):
    """A message of the client broke a rule and was dropped; the reason says which."""

    client: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Stop(Explained):
    """The run is over, and why.

    Attributes:
        failed: it has no result: the server could not, or may not, go on.
    """

    client: int
    reason: str
    failed: bool = False
