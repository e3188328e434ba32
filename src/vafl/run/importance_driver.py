"""Drive an importance study over the network."""

import time
from dataclasses import dataclass, field

from vafl.protocol.inquiry import Inquiry
from vafl.protocol.messages import ServerMessage
from vafl.run.permutations import Study
from vafl.run.prediction_driver import Served


@dataclass
class Questions:
    """Sends the requests of the study, and gives up on clients that do not answer in time.

    Args:
        patience: seconds that a client has for each answer, including the time to reconnect.
    """

    study: Study
    patience: float
    interrupted: bool = False
    _began: bool = False
    _asked_at: dict[Inquiry, float] = field(default_factory=dict)

    def __call__(self, federation: Served) -> list[ServerMessage]:
        """Advance the study and return the messages to send. The server's worker calls this repeatedly."""
        if self.interrupted:
            federation.finish("the server was told to stop")
        if federation.began is None or self.interrupted:
            return []
        scorer, now = federation.server, time.monotonic()
        if not self._began:
            self._began = True
            scorer.start_without(federation.seen)
        for inquiry in self.study.waiting:
            if inquiry.is_open and now - self._asked_at.setdefault(inquiry, now) > self.patience:
                scorer.give_up(inquiry)
        requests: list[ServerMessage] = [*self.study.advance()]
        self._asked_at = {inquiry: self._asked_at.get(inquiry, now) for inquiry in self.study.waiting}
        if self.study.is_done:
            federation.finish(f"the importance of features was measured on {self.study.rows:,} records")
        return requests
