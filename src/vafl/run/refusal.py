"""Why a live request is not answered."""

from collections.abc import Mapping
from typing import Any


class Refusal(Exception):
    """A request that is not answered, as its caller will read it.

    Args:
        status: The HTTP status.
        kind: One word for programs; the error's `type`.
        message: A sentence for people.
        hangs_up: Close the connection after the refusal: strangers get one request for each connection.
        headers: Further headers of the response.
        facts: Further entries of the error.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        hangs_up: bool = False,
        headers: Mapping[str, str] | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.hangs_up, self.headers = status, kind, hangs_up, headers or {}
        self.body = {"type": kind, "message": message, **facts}
