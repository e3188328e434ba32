"""Messages of a secure sum: the keys of each epoch, and masked scores."""

from dataclasses import dataclass

from vafl.arrays import RowIds, Words
from vafl.protocol.messages.checks import (
    require_counts,
    require_offer,
    require_rows,
    require_some,
    require_words,
)


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A client's public key for one key epoch, with a proof of origin. The server relays it to the others."""

    client: int
    sequence: int
    epoch: int
    offer: bytes

    def __post_init__(self) -> None:
        require_counts(sequence=self.sequence, epoch=self.epoch)
        require_offer(self.offer)


class Masked:
    """Base of messages with masked words."""

    __slots__ = ()
    sequence: int
    epoch: int
    rows: RowIds
    words: Words

    def require(self, **counts: int) -> None:
        """Raise InvalidMessage for the first field that is wrong; `counts` are counts of the subclass."""
        require_counts(sequence=self.sequence, epoch=self.epoch, **counts)
        require_rows(self.rows)
        require_words(self.words, self.rows.size)


@dataclass(frozen=True, slots=True, eq=False)
class MaskedUpload(Masked):
    """Masked scores of the minibatch of one activation. The masks cancel in the sum over all clients.

    Attributes:
        epoch: the key epoch of the masks.
        words: [batch, width], masked scores modulo 2^64.
    """

    client: int
    sequence: int
    epoch: int
    activation: int
    rows: RowIds
    words: Words

    def __post_init__(self) -> None:
        self.require(activation=self.activation)
        require_some(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class MaskedRefresh(Masked):
    """The answer to `request`: masked scores of its rows."""

    client: int
    sequence: int
    epoch: int
    request: int
    rows: RowIds
    words: Words

    def __post_init__(self) -> None:
        self.require(request=self.request)


@dataclass(frozen=True, slots=True, eq=False)
class Rekey:
    """A new key epoch begins: earlier masks are void, and the client must offer a fresh key."""

    client: int
    epoch: int
    reason: str

    def __post_init__(self) -> None:
        require_counts(epoch=self.epoch)


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """The offers of all clients for an epoch, in the order of the clients."""

    client: int
    epoch: int
    offers: tuple[bytes, ...]

    def __post_init__(self) -> None:
        require_counts(epoch=self.epoch)
        for offer in self.offers:
            require_offer(offer)
