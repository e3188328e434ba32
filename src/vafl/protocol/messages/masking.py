"""What a secure sum needs beside: keys for each epoch of masks, and embeddings under masks."""

from dataclasses import dataclass

from vafl.protocol.messages.checks import (
    HEADER_BYTES,
    ROW_BYTES,
    Explained,
    Words,
    require_counts,
    require_offer,
    require_rows,
    require_some,
    require_words,
)
from vafl.protocol.rows import Rows


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A client's public key for one epoch of masks, with the proof whose it is: for the other clients."""

    client: int
    sequence: int
    epoch: int
    offer: bytes

    def __post_init__(self) -> None:
        require_counts(sequence=self.sequence, epoch=self.epoch)
        require_offer(self.offer)

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + len(self.offer)


class Masked:
    """Words of some rows, under the masks of an epoch."""

    __slots__ = ()
    sequence: int
    epoch: int
    rows: Rows
    words: Words

    def require(self, **own: int) -> None:
        """Raises InvalidMessage with the first fault; `own` are counts that this kind has beside."""
        require_counts(sequence=self.sequence, epoch=self.epoch, **own)
        require_rows(self.rows)
        require_words(self.words, self.rows.size)

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + ROW_BYTES * self.rows.size + self.words.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class MaskedUpload(Masked):
    """As `Upload`, but each word is a score under masks that cancel only in the sum over all clients.

    Attributes:
        epoch: whose masks these are.
        words: [batch, width] modulo 2^64.
    """

    client: int
    sequence: int
    epoch: int
    activation: int
    rows: Rows
    words: Words

    def __post_init__(self) -> None:
        self.require(activation=self.activation)
        require_some(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class MaskedRefresh(Masked):
    """As `Refresh`, in answer to `request`, under masks as `MaskedUpload` is."""

    client: int
    sequence: int
    epoch: int
    request: int
    rows: Rows
    words: Words

    def __post_init__(self) -> None:
        self.require(request=self.request)


@dataclass(frozen=True, slots=True, eq=False)
class Rekey(Explained):
    """Masks made so far are void, and why; a fresh key for the new epoch, please."""

    client: int
    epoch: int
    reason: str

    def __post_init__(self) -> None:
        require_counts(epoch=self.epoch)


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """What every client has offered for an epoch, in their order: masks can be made."""

    client: int
    epoch: int
    offers: tuple[bytes, ...]

    def __post_init__(self) -> None:
        require_counts(epoch=self.epoch)
        for offer in self.offers:
            require_offer(offer)

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + sum(8 + len(offer) for offer in self.offers)
