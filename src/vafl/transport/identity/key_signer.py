"""Statements signed with a party's certificate: whoever passes them on cannot change or invent one.

TLS tells the server who speaks. It tells the clients nothing about each other: what the server relays
between them is signed here, and checked against the authority that both trust.
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

_CONTEXT = b"vafl statement\0"  # a TLS signature begins otherwise: neither can pass for the other
_LENGTH = struct.Struct("<H")


class CertificateWitness:
    """Signs with this party's key, and checks others' signatures and certificates.

    A proof is the signature's length, the signature, and the certificate.
    """

    def __init__(self, credentials: Credentials) -> None:
        key = load_pem_private_key(credentials.key, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(
                "VFL-6201", f"a party's key must be an elliptic-curve one. Found {type(key).__name__}."
            )
        self._key = key
        self._authority = x509.load_pem_x509_certificate(credentials.authority)
        own = x509.load_pem_x509_certificate(credentials.certificate)
        self._certificate = own.public_bytes(Encoding.DER)

    def vouch(self, statement: bytes) -> bytes:
        """A proof that this party made the statement."""
        signature = self._key.sign(_CONTEXT + statement, ec.ECDSA(SHA256()))
        return _LENGTH.pack(len(signature)) + signature + self._certificate

    def check(self, party: str, statement: bytes, proof: bytes) -> None:
        """Raises Unauthenticated unless `party`, by a certificate of our authority, made the statement."""
        where = f"the certificate relayed for {party}"
        try:
            (length,) = _LENGTH.unpack_from(proof)
            signature, content = proof[2 : 2 + length], proof[2 + length :]
            certificate = x509.load_der_x509_certificate(content)
            pem.check_issuer(certificate, self._authority, where)
            pem.check_dates(certificate, where, datetime.now(UTC))
            signer = table_owner(party)  # the label holder's client has no certificate but the server's
            check_name(certificate, signer, where)
            check_usage(certificate, signer, where)
            key = certificate.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError(f"its key is {type(key).__name__}")
            key.verify(signature, _CONTEXT + statement, ec.ECDSA(SHA256()))
        except (ValueError, TypeError, struct.error, InvalidSignature) as error:
            raise Unauthenticated(
                "VFL-6202",
                f"what the server relays of {party} must be signed by {party}. Found that it is not "
                f"({error or 'the signature is not of this statement'}). The server may be reading along: do "
                "not go on before it is known why.",
            ) from error
