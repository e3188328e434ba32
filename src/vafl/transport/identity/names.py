"""How a certificate names its party."""

from collections.abc import Iterable, Mapping

from cryptography import x509

from vafl.errors import Unauthenticated
from vafl.names import PARTY

SERVER_NAME = "vafl-server"
"""The DNS name in the server's certificate, which clients require."""

_URI = "vafl:party/"


def party_uri(name: str) -> x509.UniformResourceIdentifier:
    """Return the URI that names this party in its certificate's subject alternative names."""
    return x509.UniformResourceIdentifier(_URI + name)


def party_of(auth_context: Mapping[str, Iterable[bytes]]) -> str:
    """Return the name of the party at the other end, from the certificate of its TLS handshake.

    Args:
        auth_context: `context.auth_context()` of a gRPC call.

    Raises:
        Unauthenticated: The peer has no certificate, or its certificate does not name exactly one party.
    """
    security = _texts(auth_context, "transport_security_type")
    if security != ["ssl"]:
        raise Unauthenticated(
            "VFL-6221",
            "a peer must show its certificate (mutual TLS). "
            f"Found a connection with security {', '.join(security) or 'unknown'}. "
            "Connect with the files that `vafl certs` made for the party.",
        )
    # "peer_uri" holds URIs only; "x509_subject_alternative_name" would mix in host names.
    uris = _texts(auth_context, "peer_uri")
    name = uris[0].removeprefix(_URI) if len(uris) == 1 and uris[0].startswith(_URI) else ""
    if not PARTY.fullmatch(name):
        raise Unauthenticated(
            "VFL-6222",
            f"a peer's certificate must name one party, as the URI {_URI}NAME. "
            f"Found {', '.join(map(repr, uris)) or 'no URI'}. Issue its certificate with `vafl certs`.",
        )
    return name


def _texts(auth_context: Mapping[str, Iterable[bytes]], key: str) -> list[str]:
    return [value.decode("utf-8", "backslashreplace") for value in auth_context.get(key, ())]
