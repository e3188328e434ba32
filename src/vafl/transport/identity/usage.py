"""The purpose of a certificate: the server's is for serving, any other for dialling."""

from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from vafl.errors import ConfigError
from vafl.names import SERVER

_WORDS = {ExtendedKeyUsageOID.SERVER_AUTH: "serving", ExtendedKeyUsageOID.CLIENT_AUTH: "dialling"}


def usage_of(party: str) -> x509.ObjectIdentifier:
    """Return the only purpose that a party's certificate may have."""
    return ExtendedKeyUsageOID.SERVER_AUTH if party == SERVER else ExtendedKeyUsageOID.CLIENT_AUTH


def check_usage(certificate: x509.Certificate, party: str, path: Path | str) -> None:
    """Raise ConfigError unless the certificate at `path` is for the party's end of a connection only."""
    try:
        usages = list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        usages = []
    expected = usage_of(party)
    if usages != [expected]:
        words = ", ".join(_WORDS.get(usage, usage.dotted_string) for usage in usages)
        raise ConfigError(
            "VFL-6241",
            f'"{path}", the certificate of "{party}", must be for {_WORDS[expected]} only. '
            f"Found one for {words or 'any use'}. Issue it with `vafl certs`.",
        )
