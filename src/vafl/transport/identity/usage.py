"""Which end of a connection a certificate is for: the server's to serve, any other to dial."""

from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from vafl.errors import ConfigError
from vafl.names import SERVER

_WORDS = {ExtendedKeyUsageOID.SERVER_AUTH: "serving", ExtendedKeyUsageOID.CLIENT_AUTH: "dialling"}


def usage_of(party: str) -> x509.ObjectIdentifier:
    """The only purpose a party's certificate is good for."""
    return ExtendedKeyUsageOID.SERVER_AUTH if party == SERVER else ExtendedKeyUsageOID.CLIENT_AUTH


def check_usage(certificate: x509.Certificate, party: str, path: Path | str) -> None:
    """The certificate at `path` must be good for the party's end of a connection, and for nothing else."""
    try:
        found = list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        found = []
    expected = usage_of(party)
    if found != [expected]:
        words = ", ".join(_WORDS.get(usage, usage.dotted_string) for usage in found)
        raise ConfigError(
            "VFL-6241",
            f'"{path}" must be for {_WORDS[expected]} only, being the certificate of "{party}". '
            f"Found one for {words or 'any use'}. Have it issued with `vafl certs`.",
        )
