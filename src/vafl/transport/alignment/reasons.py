"""Errors that end an alignment, and what each party may learn about them.

An error at the server may reveal facts about one client's ids or about the server's files. Such an error
stays in the server's log. A client receives only what concerns itself.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from vafl.errors import DataError, InvalidMessage, Stalled
from vafl.transport.identity import SERVER

LONGEST_REASON = 1000  # bytes
_ELSEWHERE = (
    "the cause is at another party. Ask the operator of the server, whose log has the reason. Then start "
    "every party again."
)


class Broken(InvalidMessage):
    """A party broke the protocol.

    Attributes:
        other: the party that broke it.
    """

    def __init__(self, code: str, other: str, fault: InvalidMessage) -> None:
        super().__init__(code, f"{other} broke the protocol: {fault.message}")
        self.other = other


class Unlike(DataError):
    """Too few ids match.

    Args:
        words: client -> the message for it, for the clients that it concerns.
    """

    def __init__(self, code: str, words: Mapping[str, str]) -> None:
        super().__init__(code, " ".join(dict.fromkeys(words.values())))
        self.words = words


@contextmanager
def blaming(other: str) -> Iterator[None]:
    """Add the sender's name to an InvalidMessage that is raised inside."""
    try:
        yield
    except InvalidMessage as fault:
        raise Broken("VFL-6041", other, fault) from fault


def advice(party: str, exact: int, loosened: int) -> str:
    """Describe what is wrong with a client's ids; empty if nothing is.

    Args:
        exact: how many ids match.
        loosened: how many match without case, leading zeros and surrounding blanks.
    """
    if loosened > 10 * exact:
        return (
            f"ids must be written the same way at every party. Those of {party} and of the {SERVER} are not: "
            "far more would match without case, leading zeros and surrounding blanks "
            '("007" is not 7). Write them in the same form and align again.'
        )
    if not exact:
        return (
            f"a client must have some of the {SERVER}'s records. {party} has none of them. Check the files "
            "and the id columns of both parties."
        )
    return ""


def reason_for(party: str, error: BaseException) -> str:
    """Return what a client may learn about the error that ended the alignment at the server.

    Every client may learn who was missing or silent: they have all been waiting for that party.
    """
    if isinstance(error, asyncio.CancelledError):
        return "the server was ended."
    if isinstance(error, Stalled) or (isinstance(error, Broken) and error.other == party):
        return str(error)
    return error.words.get(party, _ELSEWHERE) if isinstance(error, Unlike) else _ELSEWHERE
