"""Read, write and check certificates and private keys in PEM files."""

from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from vafl.errors import ConfigError
from vafl.transport.identity import files

_REMEDY = "Use files that belong together, from one run of `vafl certs`."


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return an unencrypted PKCS #8 key. Write it only to a private file."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def certificate_to_pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate as PEM. It holds no secret."""
    return certificate.public_bytes(Encoding.PEM)


def read_certificate(path: Path) -> x509.Certificate:
    """Read a file with exactly one certificate. With two, the checked one might not be the trusted one."""
    content = files.read(path)
    try:
        certificates = x509.load_pem_x509_certificates(content)
    except ValueError:
        certificates = []
    if len(certificates) != 1:
        raise ConfigError(
            "VFL-6231",
            f'"{path}" must hold one certificate in PEM form. Found {len(certificates) or "none"}. {_REMEDY}',
        )
    return certificates[0]


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a private key from a file that other users cannot read."""
    content = files.read(path, private=True)
    try:
        key = load_pem_private_key(content, password=None)
    except (TypeError, ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            "VFL-6232",
            f'"{path}" must hold an elliptic-curve private key in PEM form, without a password. '
            f"Found {type(key).__name__ if key else 'something else'}. {_REMEDY}",
        )
    return key


def check_pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, path: Path) -> None:
    """Raise ConfigError unless the key at `path` belongs to the certificate."""
    if certificate.public_key() != key.public_key():
        raise ConfigError(
            "VFL-6233",
            f'"{path}" must be the key of the certificate in the same folder. Found another key. {_REMEDY}',
        )


def check_issuer(certificate: x509.Certificate, authority: x509.Certificate, path: Path | str) -> None:
    """Raise ConfigError unless the authority has signed the certificate at `path`."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise ConfigError(
            "VFL-6234",
            f'"{path}" must be signed by the authority in this party\'s ca.pem. Found one issued by '
            f'"{certificate.issuer.rfc4514_string()}" and the authority '
            f'"{authority.subject.rfc4514_string()}". {_REMEDY}',
        ) from None


def check_authority(certificate: x509.Certificate, path: Path) -> None:
    """Raise ConfigError unless the certificate at `path` is that of an authority."""
    try:
        may_sign = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        may_sign = False
    if not may_sign:
        raise ConfigError(
            "VFL-6235",
            f'"{path}" must be an authority\'s certificate. Found '
            f'"{certificate.subject.rfc4514_string()}", which may not sign certificates. {_REMEDY}',
        )


def check_dates(certificate: x509.Certificate, path: Path | str, now: datetime) -> None:
    """Raise ConfigError unless the certificate at `path` is valid at `now`."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if begin <= now <= end:
        return
    state = "expired" if now > end else "not valid yet"
    raise ConfigError(
        "VFL-6236",
        f'"{path}" must be valid now. Found it {state}: it is valid from {begin:%Y-%m-%d %H:%M} to '
        f"{end:%Y-%m-%d %H:%M} UTC, and this machine's clock says {now:%Y-%m-%d %H:%M} UTC. Correct the "
        "clock if it is wrong, or issue a new certificate with `vafl certs --overwrite`.",
    )
