"""TLS for callers of `vafl serve`, who check the server's certificate and authenticate with an API key."""

import ipaddress
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from cryptography import x509

from vafl.errors import ConfigError
from vafl.transport.identity import files, pem


@dataclass(frozen=True)
class Https:
    """A server certificate, loaded for TLS.

    Attributes:
        context: for the listening socket.
        names: the host names and addresses in the certificate, in lower case; `*.example.org` stands for
            every name one level below.
    """

    context: ssl.SSLContext
    names: frozenset[str]

    @classmethod
    def load(cls, certificate: Path, key: Path) -> "Https":
        """Read a certificate, with its chain if there is one, and its private key.

        Raises:
            ConfigError: A file cannot be used, other users can read the key, the two files do not belong
                together, or the certificate is expired or not yet valid.
        """
        remedy = "Give --tls-certificate and --tls-key PEM files that this user can read."
        content = files.read(certificate, remedy=remedy)
        files.read(key, private=True, remedy=remedy)
        try:
            leaf = x509.load_pem_x509_certificates(content)[0]  # the chain follows it
        except (ValueError, IndexError) as error:
            raise ConfigError(
                "VFL-6191", f'"{certificate}" must be a certificate in PEM form. Found: {error}. {remedy}'
            ) from error
        pem.check_dates(leaf, certificate, datetime.now(UTC))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(certificate, key, password=_refuse_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(
                "VFL-6192",
                f'"{key}" must be the private key of "{certificate}", in PEM form and without a password. '
                f"Found: {error}. Give the two files that were made together.",
            ) from error
        return cls(context, _names(leaf))

    def covers(self, host: str) -> bool:
        """Return whether the certificate names this host."""
        return host in self.names or f"*.{host.partition('.')[2]}" in self.names


def _refuse_password() -> NoReturn:
    # Without a callback, OpenSSL would ask for the password on the terminal, and a service would hang.
    raise ValueError("it has a password")


def _names(certificate: x509.Certificate) -> frozenset[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    hosts: list[str | ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    hosts += names.get_values_for_type(x509.DNSName)
    hosts += [name for name in names.get_values_for_type(x509.IPAddress) if not isinstance(name, _NETWORKS)]
    return frozenset(str(name).lower() for name in hosts)


_NETWORKS = (ipaddress.IPv4Network, ipaddress.IPv6Network)
