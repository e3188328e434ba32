"""The key epochs of a secure sum, as the server keeps them. The diagram is in training.py."""

from collections.abc import Set

from vafl.errors import InvalidMessage
from vafl.protocol.messages import Keys, Offer, Rekey


class KeyEpochs:
    """Collects one key per client and epoch, starting with epoch 0.

    Attributes:
        number: the current epoch.
    """

    def __init__(self, clients: int) -> None:
        self.number, self._clients = 0, clients
        self._offers: dict[int, bytes] = {}

    @property
    def missing(self) -> set[int]:
        """Return the clients that have not offered a key for the current epoch."""
        return set(range(self._clients)) - self._offers.keys()

    def is_void(self, number: int) -> bool:
        """Return whether a message of epoch `number` is out of date.

        Its client sent it before it knew of the current epoch, so this is no fault.

        Raises:
            InvalidMessage: the epoch has not begun.
        """
        if number > self.number:
            raise InvalidMessage(
                "VFL-4131",
                f"a message must be of the current key epoch, {self.number}, or an earlier one. "
                f"Found epoch {number}.",
            )
        return number < self.number

    def require_keys(self, client: int) -> None:
        """Raise InvalidMessage if a client sends masked words before all keys are there."""
        if self.missing:
            raise InvalidMessage(
                "VFL-4132",
                f"client {client} cannot have masks for epoch {self.number}: the keys of clients "
                f"{sorted(self.missing)} are missing.",
            )

    def take(self, offer: Offer) -> list[Keys]:
        """Store a key; when the last one arrives, return all keys for every client."""
        if offer.client in self._offers:
            raise InvalidMessage(
                "VFL-4133",
                f"a client offers one key per epoch. Found a second one of client {offer.client} for epoch "
                f"{self.number}.",
            )
        self._offers[offer.client] = offer.offer
        if self.missing:
            return []
        offers = tuple(content for _, content in sorted(self._offers.items()))
        return [Keys(client, self.number, offers) for client in range(self._clients)]

    def end(self, client: int, why: str, absent: Set[int]) -> list[Rekey] | None:
        """Begin the next epoch because a client left or joined again. Its key and all masks are void.

        Returns:
            A `Rekey` for each other client that is present; None if the client had offered no key, so that
            the epoch goes on.
        """
        if client not in self._offers:
            return None
        self.number += 1
        self._offers.clear()
        present = [other for other in range(self._clients) if other not in absent | {client}]
        reason = f"{why}: what was under way is sent again under the masks of epoch {self.number}"
        return [Rekey(other, self.number, reason) for other in present]
