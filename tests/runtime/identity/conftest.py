"""An authority with its parties' files, and certificates that `issue` would never make."""

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from vafl.runtime.identity import Credentials, issue, make_authority, pem

DIALLING, SERVING = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """An authority that has issued for the server and two clients. Read only."""
    path = tmp_path_factory.mktemp("authority") / "certs"
    make_authority(path)
    for party in ("server", "client-1", "client-2"):
        issue(path, party)
    return path


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory):
    """Another authority, with parties of the same names. Read only."""
    path = tmp_path_factory.mktemp("other") / "certs"
    make_authority(path)
    for party in ("server", "client-1"):
        issue(path, party)
    return path


@pytest.fixture
def load(folder):
    return lambda party: Credentials.load(folder / party, party)


@pytest.fixture(scope="session")
def forge(folder):
    """Signs, with the authority's true key, whatever the test asks for; the result is not checked."""
    authority = pem.read_certificate(folder / "ca.pem")
    authority_key = pem.read_key(folder / "ca.key")

    def make(party="client-1", *, names=None, usage=(DIALLING,), begin=-2.0, end=2.0):
        """A certificate that holds from `begin` to `end`, in hours from now."""
        now, key = datetime.now(UTC), ec.generate_private_key(ec.SECP256R1())
        if names is None:
            names = [x509.UniformResourceIdentifier(f"vafl:party/{party}")]
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, party)]))
            .issuer_name(authority.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(hours=begin))
            .not_valid_after(now + timedelta(hours=end))
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        if usage:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=True)
        certificate = pem.certificate_to_pem(builder.sign(authority_key, SHA256()))
        return Credentials(party, pem.certificate_to_pem(authority), certificate, pem.key_to_pem(key))

    return make


@pytest.fixture(scope="session")
def forge_server(forge):
    def make(*, name="vafl-server", usage=SERVING, **dates):
        names = [x509.UniformResourceIdentifier("vafl:party/server"), x509.DNSName(name)]
        return forge("server", names=names, usage=(usage,), **dates)

    return make
