"""Why an alignment ends, in the words that each party may read.

The server's error may tell of one client's ids, or of the server's own files: it stays in the server's log,
and a client is told what is about itself.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from vafl.errors import DataError, InvalidMessage, Stalled
from vafl.transport.identity import SERVER

LONGEST_REASON = 1000
_ELSEWHERE = (
    "the reason is not this party's. The server's log has it: ask there, and start every party again."
)


class Broken(InvalidMessage):
    """Somebody broke the protocol, and who."""

    def __init__(self, code: str, other: str, fault: InvalidMessage) -> None:
        super().__init__(code, f"{other} broke the protocol: {fault.message}")
        self.other = other


class Unlike(DataError):
    """Too little is common.

    Args:
        words: what each client is told whom it is about.
    """

    def __init__(self, code: str, words: Mapping[str, str]) -> None:
        super().__init__(code, " ".join(dict.fromkeys(words.values())))
        self.words = words


@contextmanager
def blaming(other: str) -> Iterator[None]:
    """Whoever sent what was refused is named."""
    try:
        yield
    except InvalidMessage as fault:
        raise Broken("VFL-6041", other, fault) from fault


def advice(party: str, exact: int, loosened: int) -> str:
    """What is wrong with a client's ids, if anything is.

    Args:
        exact: how many are common.
        loosened: how many would be in forms that forget how they are written.
    """
    if loosened > 10 * exact:
        return (
            f"ids must be written the same way at every party. Those of {party} and of the {SERVER} are not: "
            "far more would be the same without leading zeros, blanks around them and case "
            '("007" is not 7). Write them alike, and align again.'
        )
    if not exact:
        return (
            f"a client must have some of the {SERVER}'s records. {party} has none of them. Are these the "
            "right files and id columns?"
        )
    return ""


def reason_for(party: str, error: BaseException) -> str:
    """What a client is told of the error that ended the alignment at the server.

    Who is away is told to all, who waited for it."""
    if isinstance(error, asyncio.CancelledError):
        return "the server was ended."
    if isinstance(error, Stalled) or (isinstance(error, Broken) and error.other == party):
        return str(error)
    return error.words.get(party, _ELSEWHERE) if isinstance(error, Unlike) else _ELSEWHERE
