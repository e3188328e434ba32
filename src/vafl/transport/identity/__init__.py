"""Who is who between hosts: one authority, one certificate per party, mutual TLS. No sockets here.

    DIR/ca.pem  DIR/ca.key                              whoever runs `vafl certs`
    DIR/client-1/{ca.pem, client-1.pem, client-1.key}   handed to client-1, and so on for each party

A party's name is a URI in its certificate, `vafl:party/<name>`, and nothing it sends can change it. The
server's certificate also carries the name `vafl-server`, which clients insist on whatever host they
dial. Certificates are good for one end of a connection only: `server` serves, all others dial.

Callers of `vafl serve` are not parties. They prove themselves by an API key (api_keys.py).
"""

from vafl.names import SERVER
from vafl.transport.identity.api_keys import Callers, add_key, read_keys, remove_key
from vafl.transport.identity.authority import issue, make_authority
from vafl.transport.identity.credentials import Credentials
from vafl.transport.identity.handshake import closed_early, refusal
from vafl.transport.identity.https import Https
from vafl.transport.identity.key_signer import CertificateWitness
from vafl.transport.identity.loopback import LOOPBACK_OPTIONS, HttpAddress, is_loopback, require_loopback
from vafl.transport.identity.names import SERVER_NAME, party_of

__all__ = [
    "LOOPBACK_OPTIONS",
    "SERVER",
    "SERVER_NAME",
    "Callers",
    "CertificateWitness",
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
