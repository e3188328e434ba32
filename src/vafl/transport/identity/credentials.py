"""One party's files, checked, and what gRPC makes of them."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import grpc
from cryptography import x509

from vafl.errors import ConfigError
from vafl.names import SERVER, check_party
from vafl.transport.identity import pem
from vafl.transport.identity.names import SERVER_NAME, party_uri
from vafl.transport.identity.usage import check_usage


@dataclass(frozen=True)
class Credentials:
    """What a party proves its name with, and whom it trusts. `load` checks; the constructor does not.

    Attributes:
        party: The name in the certificate.
        authority: The certificate, as PEM, that must have signed the other end's.
        certificate: The party's own, as PEM.
        key: Its private key, as PEM.
    """

    party: str
    authority: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)

    @classmethod
    def load(cls, folder: Path, party: str, *, now: datetime | None = None) -> Self:
        """Reads ca.pem, PARTY.pem and PARTY.key of a folder.

        Raises:
            ConfigError: A file is missing or unreadable; others could read the key; key, certificate
                and authority do not belong together; a certificate is out of date, names another
                party, or is for the other end of a connection.
        """
        now = now or datetime.now(UTC)
        check_party(party)
        authority_path, path, key_path = folder / "ca.pem", folder / f"{party}.pem", folder / f"{party}.key"
        authority, certificate = pem.read_certificate(authority_path), pem.read_certificate(path)
        key = pem.read_key(key_path)
        pem.check_authority(authority, authority_path)
        pem.check_pair(certificate, key, key_path)
        pem.check_issuer(certificate, authority, path)
        pem.check_dates(authority, authority_path, now)
        pem.check_dates(certificate, path, now)
        check_name(certificate, party, path)
        check_usage(certificate, party, path)
        # Written anew, so that gRPC is given what was checked and no more.
        trusted, own = pem.certificate_to_pem(authority), pem.certificate_to_pem(certificate)
        return cls(party, trusted, own, pem.key_to_pem(key))

    def require_in_date(self, *, now: datetime | None = None) -> None:
        """Raises ConfigError if the certificate has run out since it was loaded: the server could only hang
        up on it."""
        certificate = x509.load_pem_x509_certificate(self.certificate)
        pem.check_dates(certificate, f"{self.party}.pem", now or datetime.now(UTC))

    def server_credentials(self) -> grpc.ServerCredentials:
        """To listen with: every client must show a certificate of this authority."""
        if self.party != SERVER:
            raise ConfigError(
                "VFL-6161",
                f'only the party "{SERVER}" may serve. Found the credentials of "{self.party}". '
                "Start the server with its own files.",
            )
        pairs = [(self.key, self.certificate)]
        return grpc.ssl_server_credentials(pairs, self.authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """To dial with, together with `channel_options`."""
        if self.party == SERVER:
            raise ConfigError(
                "VFL-6162",
                f'the party "{SERVER}" dials nobody: its certificate is good for serving only. '
                "Start the client with its own files.",
            )
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Makes the channel insist on the server's own name, whatever host is dialled."""
        return (("grpc.ssl_target_name_override", SERVER_NAME),)


def check_name(certificate: x509.Certificate, party: str, path: Path | str) -> None:
    """The certificate at `path` must name this party, and no other."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        found = []
    if found != [party_uri(party).value]:
        raise ConfigError(
            "VFL-6163",
            f'"{path}" must name the party as {party_uri(party).value}, and no other. Found '
            f"{', '.join(found) or 'no name'}. Use the files made for this party, under the names they had.",
        )
