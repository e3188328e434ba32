"""Certificates and private keys as PEM files, and the checks on one of them or on a pair."""

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

_REMEDY = "Take the files from one run of `vafl certs`, unmixed."


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """An unencrypted PKCS #8 key, for a file only its owner can read."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def certificate_to_pem(certificate: x509.Certificate) -> bytes:
    """A certificate as it stands in a file; it holds no secret."""
    return certificate.public_bytes(Encoding.PEM)


def read_certificate(path: Path) -> x509.Certificate:
    """Reads the one certificate of a file: with two, what is checked might not be what is trusted."""
    content = files.read(path)
    try:
        found = x509.load_pem_x509_certificates(content)
    except ValueError:
        found = []
    if len(found) != 1:
        raise ConfigError(
            "VFL-6231",
            f'"{path}" must hold one certificate in PEM form. Found {len(found) or "none"}. {_REMEDY}',
        )
    return found[0]


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Reads a private key that others cannot read."""
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
    """The key at `path` must be the one the certificate speaks of."""
    if certificate.public_key() != key.public_key():
        raise ConfigError(
            "VFL-6233",
            f'"{path}" must be the key of the certificate beside it. Found the key of another. {_REMEDY}',
        )


def check_issuer(certificate: x509.Certificate, authority: x509.Certificate, path: Path | str) -> None:
    """The certificate at `path` must carry the authority's signature."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise ConfigError(
            "VFL-6234",
            f'"{path}" must be signed by the authority in the ca.pem beside it. Found one issued by '
            f'"{certificate.issuer.rfc4514_string()}" and the authority '
            f'"{authority.subject.rfc4514_string()}". {_REMEDY}',
        ) from None


def check_authority(certificate: x509.Certificate, path: Path) -> None:
    """The certificate at `path` must be one that may sign others."""
    try:
        may_sign = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        may_sign = False
    if not may_sign:
        raise ConfigError(
            "VFL-6235",
            f'"{path}" must be an authority\'s certificate. Found '
            f'"{certificate.subject.rfc4514_string()}", which may sign nothing. {_REMEDY}',
        )


def check_dates(certificate: x509.Certificate, path: Path | str, now: datetime) -> None:
    """The certificate at `path` must hold now, by this machine's clock."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if begin <= now <= end:
        return
    state = "expired" if now > end else "not valid yet"
    raise ConfigError(
        "VFL-6236",
        f'"{path}" must be in date. Found it {state}: it holds from {begin:%Y-%m-%d %H:%M} to '
        f"{end:%Y-%m-%d %H:%M} UTC and this machine's clock says {now:%Y-%m-%d %H:%M} UTC. "
        "Set the clock if it is wrong, or have a new one issued with `vafl certs --overwrite`.",
    )
