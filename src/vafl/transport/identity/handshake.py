"""Refused handshakes in words.

A handshake is refused below Python, where no callback leads. The server's side of the story is the line
gRPC itself writes to stderr ("Handshake failed with error ..."), unless GRPC_VERBOSITY is ERROR or NONE.
The client's side is a status UNAVAILABLE with details in OpenSSL's words; here they get ours.
"""

from vafl.errors import Unauthenticated
from vafl.transport.identity.names import SERVER_NAME

# What gRPC's status details contain, and what that means to whoever runs the client. First match wins.
_MEANINGS = (
    (
        "certificate has expired",
        "the server's certificate must be in date. Found an expired one. Have it issued anew, or set this "
        "machine's clock if it is wrong.",
    ),
    (
        "certificate is not yet valid",
        "the server's certificate must be in date. Found one that is not valid yet. Set the clock that is "
        "wrong, this machine's or the one it was issued on.",
    ),
    (
        "unsupported certificate purpose",
        "the server's certificate must be for serving. Found one for dialling, so a client poses as the "
        "server. Check the address and who answers there.",
    ),
    (
        "Hostname Verification Check failed",
        f'the server\'s certificate must carry the name "{SERVER_NAME}". Found other names. Check the '
        "address and who answers there.",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "the server must speak TLS. Found something else at that address. Check the address, and that the "
        "server was started with its certificate.",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the server's certificate must be signed by the authority in this party's ca.pem. Found one that is "
        "not. Check the address, and that both took their files from the same authority.",
    ),
)
_CLOSED = ("failed to connect to all addresses", "Socket closed")
_UNANSWERED = "Handshake read failed"  # the server is not there, and who took the connection for it closed it


def refusal(details: str) -> Unauthenticated | None:
    """What a failed call's `details()` say about certificates, or None if it failed for another reason."""
    for sign, meaning in _MEANINGS:
        if sign in details:
            return Unauthenticated("VFL-6181", meaning)
    if closed_early(details):
        return Unauthenticated(
            "VFL-6182",
            "the server must accept this party's certificate. Found that it closed the connection before "
            "the first message. Its log says why: no certificate, one of another authority, or one out of "
            "date by its clock.",
        )
    return None


def closed_early(details: str) -> bool:
    """Whether the server closed the connection when it had seen this party's certificate. It does so when it
    refuses that, but also when it is killed at that moment: only if it happens again and again it is a
    refusal."""
    return all(sign in details for sign in _CLOSED) and _UNANSWERED not in details
