"""Explain failed TLS handshakes.

gRPC refuses a handshake in C and calls nothing in Python. At the server, gRPC itself writes a line to stderr
("Handshake failed with error ..."), unless GRPC_VERBOSITY is ERROR or NONE. At the client, the call fails
with UNAVAILABLE and with details from OpenSSL. This module translates these details.
"""

from vafl.errors import Unauthenticated
from vafl.transport.identity.names import SERVER_NAME

# A part of gRPC's status details, and what it means to the operator of the client. The first match wins.
_MEANINGS = (
    (
        "certificate has expired",
        "the server's certificate must be valid now. Found an expired one. Issue a new one, or correct this "
        "machine's clock if it is wrong.",
    ),
    (
        "certificate is not yet valid",
        "the server's certificate must be valid now. Found one that is not valid yet. Correct the clock that "
        "is wrong: this machine's, or that of the machine that issued the certificate.",
    ),
    (
        "unsupported certificate purpose",
        "the server's certificate must be for serving. Found one for dialling, so a client poses as the "
        "server. Check the address and which process listens there.",
    ),
    (
        "Hostname Verification Check failed",
        f'the server\'s certificate must have the name "{SERVER_NAME}". Found other names. Check the '
        "address and which process listens there.",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "the server must use TLS. Found another protocol at that address. Check the address, and that the "
        "server was started with its certificate.",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the server's certificate must be signed by the authority in this party's ca.pem. Found one that is "
        "not. Check the address, and that the files of both parties are from the same authority.",
    ),
)
_CLOSED = ("failed to connect to all addresses", "Socket closed")
# gRPC's words if the connection was closed before the server answered the handshake: a forwarder has accepted
# the connection, and its server is down. The server has not seen a certificate, so it has refused none.
_UNANSWERED = "Handshake read failed"


def refusal(details: str) -> Unauthenticated | None:
    """Return the fault that a failed call's `details()` describe; None if certificates are not the cause."""
    for sign, meaning in _MEANINGS:
        if sign in details:
            return Unauthenticated("VFL-6181", meaning)
    if closed_early(details):
        return Unauthenticated(
            "VFL-6182",
            "the server must accept this party's certificate. It closed the connection before the first "
            "message. Its log says why: no certificate, a certificate of another authority, or one that has "
            "expired by the server's clock.",
        )
    return None


def closed_early(details: str) -> bool:
    """Return whether the server closed the connection after it had received this party's certificate.

    The server does so when it refuses the certificate, but also when it is killed at that moment. Only
    repeated closings are a refusal.
    """
    return all(sign in details for sign in _CLOSED) and _UNANSWERED not in details
