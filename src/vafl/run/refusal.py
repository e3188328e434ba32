"""The error response to an HTTP request that is not answered."""

from collections.abc import Mapping


class Refusal(Exception):
    """An HTTP request is refused.

    Args:
        status: The HTTP status code.
        kind: The error's `type`, one word for programs.
        message: A sentence for people.
        hangs_up: Close the connection after the response, so that an unauthenticated caller needs a new
            connection for each attempt.
        headers: Additional headers of the response.
        facts: Additional entries of the error.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        hangs_up: bool = False,
        headers: Mapping[str, str] | None = None,
        **facts: object,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.hangs_up, self.headers = status, kind, hangs_up, headers or {}
        self.body = {"type": kind, "message": message, **facts}
