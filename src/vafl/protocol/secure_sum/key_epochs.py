"""The epochs of a secure sum as the server keeps them: who has offered a key for this one."""

from collections.abc import Set

from vafl.errors import InvalidMessage
from vafl.protocol.messages import Keys, Offer, Rekey


class Epochs:
    """Begins with epoch 0; there are masks once all clients have offered a key.

    Attributes:
        number: of the epoch whose keys are in use, or being agreed on.
    """

    def __init__(self, clients: int) -> None:
        self.number, self._clients = 0, clients
        self._offers: dict[int, bytes] = {}

    @property
    def missing(self) -> set[int]:
        """The clients whose keys are not there."""
        return set(range(self._clients)) - self._offers.keys()

    def is_void(self, number: int) -> bool:
        """Whether it was said before its client knew of this epoch: no fault, and of no use."""
        if number > self.number:
            raise InvalidMessage("VFL-4131", f"masks are in epoch {self.number}. Found epoch {number}.")
        return number < self.number

    def require_keys(self, client: int) -> None:
        """Raises InvalidMessage unless there are masks."""
        if self.missing:
            raise InvalidMessage(
                "VFL-4132",
                f"client {client} cannot have masks for epoch {self.number}: not all keys are there.",
            )

    def take(self, offer: Offer) -> list[Keys]:
        """Notes a key; with the last one, gives all keys to everybody."""
        if offer.client in self._offers:
            raise InvalidMessage(
                "VFL-4133", f"a client has one key an epoch. Found another of client {offer.client}."
            )
        self._offers[offer.client] = offer.offer
        if self.missing:
            return []
        offers = tuple(content for _, content in sorted(self._offers.items()))
        return [Keys(client, self.number, offers) for client in range(self._clients)]

    def end(self, client: int, why: str, absent: Set[int]) -> list[Rekey] | None:
        """A client came or went: keys it has offered are worth nothing any more, and so are all masks.

        Returns:
            what the others are told; None if it had offered none.
        """
        if client not in self._offers:
            return None
        self.number += 1
        self._offers.clear()
        present = [other for other in range(self._clients) if other not in absent | {client}]
        reason = f"{why}: what was under way is said again under the masks of epoch {self.number}"
        return [Rekey(other, self.number, reason) for other in present]
