"""Authenticate parties: one certificate authority, one certificate per party, mutual TLS.

`vafl certs` creates these files:

    DIR/ca.pem  DIR/ca.key                              stay with the party that runs `vafl certs`
    DIR/client-1/{ca.pem, client-1.pem, client-1.key}   are given to client-1; likewise for each party

A party's name is the URI `vafl:party/<name>` in its certificate, and nothing the party sends can change it.
The server's certificate also has the DNS name `vafl-server`. Clients require that name, whatever host they
dial. A certificate is valid for one end of a connection only: the server's for serving, any other for
dialling.

Callers of `vafl serve` are not parties. They authenticate with an API key (api_keys.py).

This package makes and checks credentials. It opens no sockets.
"""

from vafl.names import SERVER
from vafl.transport.identity.api_keys import Callers, add_key, read_keys, remove_key
from vafl.transport.identity.authority import issue, make_authority
from vafl.transport.identity.credentials import Credentials
from vafl.transport.identity.handshake import closed_early, refusal
from vafl.transport.identity.https import Https
from vafl.transport.identity.key_signer import CertificateSigner
from vafl.transport.identity.loopback import LOOPBACK_OPTIONS, HttpAddress, is_loopback, require_loopback
from vafl.transport.identity.names import SERVER_NAME, party_of

__all__ = [
    "LOOPBACK_OPTIONS",
    "SERVER",
    "SERVER_NAME",
    "Callers",
    "CertificateSigner",
    "Credentials",
    "HttpAddress",
    "Https",
    "add_key",
    "closed_early",
    "is_loopback",
    "issue",
    "make_authority",
    "party_of",
    "read_keys",
    "refusal",
    "remove_key",
    "require_loopback",
]
