"""What a live caller is told when its request cannot be answered."""

from typing import Any


class Refusal(Exception):
    """A request that cannot be answered, as its caller will read it.

    Args:
        status: of HTTP.
        kind: one word for programs.
        message: a sentence for people.
        facts: whatever else helps.
    """

    def __init__(self, status: int, kind: str, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.status, self.body = status, {"type": kind, "message": message, **facts}
