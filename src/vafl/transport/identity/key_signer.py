"""Sign statements with a party's key, so that the server can relay them but not change or forge them.

TLS authenticates each client to the server, but not the clients to each other. So clients sign what the
server relays between them, and check signatures against the authority that all parties trust.
"""

import struct
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from vafl.errors import ConfigError, Unauthenticated
from vafl.names import table_owner
from vafl.transport.identity import pem
from vafl.transport.identity.credentials import Credentials, check_name
from vafl.transport.identity.usage import check_usage

# Precedes every signed statement. TLS signs with the same key, but puts another prefix in front, so a
# signature made for one purpose is never valid for the other.
_CONTEXT = b"vafl statement\0"
_LENGTH = struct.Struct("<H")


class CertificateSigner:
    """Sign statements with this party's key, and check the proofs of other parties.

    A proof is the length of a signature (uint16), the signature (ECDSA) and the certificate (DER).
    """

    def __init__(self, credentials: Credentials) -> None:
        key = load_pem_private_key(credentials.key, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(
                "VFL-6201",
                f"a party's key must be an elliptic-curve key. Found {type(key).__name__}. Use the files "
                "that `vafl certs` made.",
            )
        self._key = key
        self._authority = x509.load_pem_x509_certificate(credentials.authority)
        certificate = x509.load_pem_x509_certificate(credentials.certificate)
        self._certificate = certificate.public_bytes(Encoding.DER)

    def sign(self, statement: bytes) -> bytes:
        """Return a proof that this party made the statement."""
        signature = self._key.sign(_CONTEXT + statement, ec.ECDSA(SHA256()))
        return _LENGTH.pack(len(signature)) + signature + self._certificate

    def check(self, party: str, statement: bytes, proof: bytes) -> None:
        """Raise Unauthenticated unless `proof` shows that `party` made the statement."""
        where = f"the certificate relayed for {party}"
        try:
            (length,) = _LENGTH.unpack_from(proof)
            signature, content = proof[2 : 2 + length], proof[2 + length :]
            certificate = x509.load_der_x509_certificate(content)
            pem.check_issuer(certificate, self._authority, where)
            pem.check_dates(certificate, where, datetime.now(UTC))
            signer = table_owner(party)  # the label holder's own client signs with the server's certificate
            check_name(certificate, signer, where)
            check_usage(certificate, signer, where)
            key = certificate.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError(f"its key is {type(key).__name__}")
            key.verify(signature, _CONTEXT + statement, ec.ECDSA(SHA256()))
        except (ValueError, TypeError, struct.error, InvalidSignature) as error:
            raise Unauthenticated(
                "VFL-6202",
                f"what the server relays from {party} must be signed by {party}. Found an invalid proof "
                f"({error or 'the signature is not of this statement'}). The server may be trying to read "
                "masked values: do not continue before the cause is known.",
            ) from error
