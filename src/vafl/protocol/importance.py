"""The server's part of permutation importance: it asks single clients for embeddings of permuted features.

First every client answers for the unpermuted rows, as in any prediction. Then one client is asked for the
same rows with some of its features permuted. The embeddings of the other clients stay as they were.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from vafl.protocol.inquiry import ANSWERED, AWAITED, DECLINED, Inquiry
from vafl.protocol.marks import MarkMemory
from vafl.protocol.messages import (
    ClientMessage,
    Decline,
    Join,
    Refresh,
    Request,
    ServerMessage,
    require_growth,
)
from vafl.protocol.scoring import Scorer


@dataclass(eq=False)
class Permuted:
    """An inquiry in which one client permutes a group of its features.

    Attributes:
        group: the name of the group, or "*" for all features of the client.
        request: the number of the open request; -1 if the client has not been asked yet.
    """

    inquiry: Inquiry
    client: int
    group: str
    request: int = -1


class ImportanceScorer(Scorer):
    """A scorer that also asks for permuted features. It keeps no cache: a permuted answer fits one inquiry.

    The arguments are as for `Scorer`.

    Attributes:
        groups: client -> the names of the groups that it allows the server to ask for, from its last join.
        reasons: client -> the reason of its last decline.
    """

    def __init__(
        self,
        rows: int,
        head: nn.Module,
        defaults: Sequence[Tensor],
        *,
        summed: bool,
        marks: MarkMemory | None = None,
    ) -> None:
        super().__init__(rows, head, defaults, summed=summed, cached=False, marks=marks)
        self.groups: dict[int, tuple[str, ...]] = {}
        self.reasons: dict[int, str] = {}
        self._permuted: list[Permuted] = []

    def ask_permuted(self, base: Inquiry, client: int, group: str) -> tuple[Inquiry, list[Request]]:
        """Ask one client for the rows of `base` that it answered for, with a group of features permuted.

        Args:
            base: a closed inquiry. The new one takes the other clients' embeddings from it.
        """
        embeddings, states = base.embeddings.copy(), base.states.copy()
        inquiry = replace(base, patient=True, embeddings=embeddings, states=states)
        inquiry.states[base.states[:, client] == ANSWERED, client] = AWAITED
        asked = Permuted(inquiry, client, group)
        self._permuted.append(asked)
        return inquiry, self._ask_again(asked)

    def close(self, inquiry: Inquiry) -> None:
        """Forget an inquiry of `ask_permuted`. A later answer to it changes nothing."""
        self._permuted = [asked for asked in self._permuted if asked.inquiry is not inquiry]

    def receive(self, message: ClientMessage) -> list[ServerMessage]:
        """Handle one message; return the replies. A client that joins again is asked again.

        Raises:
            InvalidMessage: the message broke a rule. The state has not changed.
        """
        replies = super().receive(message)
        if isinstance(message, Join):
            self.groups[message.client] = tuple(name.decode() for name in message.groups)
            for asked in self._permuted:
                if asked.client == message.client:
                    replies += self._ask_again(asked)
        return replies

    def _ask_again(self, asked: Permuted) -> list[Request]:
        rows = asked.inquiry.awaited(asked.client)
        if asked.client in self.absent or not len(rows):
            return []
        request = self._requests.make(asked.client, rows, permute=asked.group)
        asked.request = request.number
        return [request]

    def _take_answer(self, message: Refresh | Decline) -> None:
        request, client = self._requests.find(message.client, message.request), message.client
        if not (isinstance(request, Request) and request.permute):
            super()._take_answer(message)
            return
        require_growth(client, message.sequence, self._sequences)
        if isinstance(message, Refresh):
            self._check_answer(message, request)
        self._sequences[client] = message.sequence
        self.overdue.discard(client)
        self._requests.answered(request)
        if isinstance(message, Decline):
            self.reasons[client] = message.reason
        for asked in self._permuted:
            if asked.request == request.number:
                if isinstance(message, Refresh):
                    asked.inquiry.take(client, message.rows, message.embeddings)
                asked.inquiry.mark(client, DECLINED, request.rows)
