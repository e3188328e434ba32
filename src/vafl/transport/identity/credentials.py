"""Load and check one party's certificate files, and turn them into gRPC credentials."""

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
    """A party's certificate and key, and the authority it trusts. Only `load` checks them.

    Attributes:
        party: The name in the certificate.
        authority: The authority's certificate as PEM. It must have signed the peer's certificate.
        certificate: The party's certificate as PEM.
        key: The party's private key as PEM.
    """

    party: str
    authority: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)

    @classmethod
    def load(cls, folder: Path, party: str, *, now: datetime | None = None) -> Self:
        """Read and check ca.pem, PARTY.pem and PARTY.key of a folder.

        Raises:
            ConfigError: A file is missing or unreadable; other users can read the key; key, certificate and
                authority do not belong together; a certificate is expired or not yet valid, names another
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
        # Serialise the checked objects again instead of passing on the files' bytes. So gRPC gets exactly
        # what was checked, and nothing else that the files may contain.
        return cls(
            party,
            authority=pem.certificate_to_pem(authority),
            certificate=pem.certificate_to_pem(certificate),
            key=pem.key_to_pem(key),
        )

    def require_in_date(self, *, now: datetime | None = None) -> None:
        """Raise ConfigError if the certificate has expired since it was loaded.

        Otherwise the server would close the connection without a reason.
        """
        certificate = x509.load_pem_x509_certificate(self.certificate)
        pem.check_dates(certificate, f"{self.party}.pem", now or datetime.now(UTC))

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for serving. Every client must have a certificate of this authority."""
        if self.party != SERVER:
            raise ConfigError(
                "VFL-6161",
                f'only the party "{SERVER}" may serve. Found the credentials of "{self.party}". Start the '
                "server with the files that were made for it.",
            )
        pairs = [(self.key, self.certificate)]
        return grpc.ssl_server_credentials(pairs, self.authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for dialling. Use them together with `channel_options`."""
        if self.party == SERVER:
            raise ConfigError(
                "VFL-6162",
                f'a client must not dial with the certificate of "{SERVER}", which is for serving only. '
                "Start the client with the files that were made for it.",
            )
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Return options that make a channel require the name `vafl-server`, whatever host it dials."""
        return (("grpc.ssl_target_name_override", SERVER_NAME),)


def check_name(certificate: x509.Certificate, party: str, path: Path | str) -> None:
    """Raise ConfigError unless the certificate at `path` names this party and no other."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    if uris != [party_uri(party).value]:
        raise ConfigError(
            "VFL-6163",
            f'"{path}" must name the party as {party_uri(party).value}, and no other. Found '
            f"{', '.join(uris) or 'no name'}. Use the files that were made for this party, and do not rename "
            "them.",
        )
