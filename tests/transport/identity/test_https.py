"""TLS for callers of `vafl serve`: which files are accepted, and which hosts a certificate names."""

import shutil

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from vafl.errors import ConfigError
from vafl.transport.identity import SERVER_NAME, Https, issue, make_authority


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("https") / "certs"
    make_authority(path)
    issue(path, "server", hosts=("Scores.example", "192.0.2.7", "2001:db8::1"))
    issue(path, "client-1")
    return path


@pytest.fixture
def own(folder, tmp_path):
    """A copy of the server's files that a test may damage."""
    return shutil.copytree(folder / "server", tmp_path / "own")


def test_a_certificate_names_its_hosts(folder):
    https = Https.load(folder / "server" / "server.pem", folder / "server" / "server.key")
    for host in (SERVER_NAME, "scores.example", "192.0.2.7", "2001:db8::1"):
        assert https.covers(host)
    for host in ("else.example", "x.scores.example", "example", "", "192.0.2.8", "vafl:party/server"):
        assert not https.covers(host)


def test_a_wildcard_names_one_level():
    https = Https(None, frozenset({"*.example.org"}))
    assert https.covers("a.example.org")
    for host in ("example.org", "a.b.example.org", "a.example.com", ""):
        assert not https.covers(host)


def test_what_cannot_be_used_is_refused_with_the_file_named(folder, own):
    certificate, key = own / "server.pem", own / "server.key"
    with pytest.raises(ConfigError, match="VFL-6192"):
        Https.load(certificate, folder / "client-1" / "client-1.key")
    with pytest.raises(ConfigError, match="VFL-6175"):
        Https.load(own / "none.pem", key)
    with pytest.raises(ConfigError, match="VFL-6191"):
        Https.load(key, key)
    key.chmod(0o640)
    with pytest.raises(ConfigError, match="VFL-6176"):
        Https.load(certificate, key)


def test_a_key_with_a_password_is_refused_instead_of_asking_for_it(own):
    locked = ed25519.Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    (own / "server.key").write_bytes(locked)
    with pytest.raises(ConfigError, match="VFL-6192"):
        Https.load(own / "server.pem", own / "server.key")
