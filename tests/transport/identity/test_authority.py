"""`make_authority` and `issue`: modes and contents of the files they write, and what they refuse."""

import ipaddress
import os
import stat
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID

from vafl.errors import ConfigError
from vafl.transport.identity import Credentials, files, issue, make_authority, pem

LONG_LABEL, LONG_NAME = "x" * 64, ".".join(["x" * 60] * 5)


@pytest.fixture
def umask():
    """Set the process's umask during a test."""
    before = os.umask(0)
    yield os.umask
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def extension(certificate, kind):
    return certificate.extensions.get_extension_for_class(kind)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777])
def test_modes_do_not_depend_on_the_umask(mask, umask, tmp_path):
    umask(mask)
    make_authority(tmp_path / "certs")
    own = issue(tmp_path / "certs", "client-1")
    assert own == tmp_path / "certs" / "client-1"
    assert {path: mode(path) for path in (tmp_path / "certs", own)} == {tmp_path / "certs": 0o700, own: 0o700}
    assert {str(path): mode(tmp_path / "certs" / path) for path in contents(tmp_path / "certs")} == {
        "ca.key": 0o600,
        "ca.pem": 0o644,
        "client-1/ca.pem": 0o644,
        "client-1/client-1.key": 0o600,
        "client-1/client-1.pem": 0o644,
    }


def test_every_file_is_born_private(umask, tmp_path, monkeypatch):
    umask(0)
    born, true_open = [], os.open

    def watched(*arguments, **options):
        descriptor = true_open(*arguments, **options)
        born.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    monkeypatch.setattr(files.os, "open", watched)
    make_authority(tmp_path / "certs")
    issue(tmp_path / "certs", "client-1")
    issue(tmp_path / "certs", "client-1", overwrite=True)
    assert born == [0o600] * 8


def test_a_folder_open_to_others_is_refused(tmp_path):
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs").chmod(0o750)
    with pytest.raises(ConfigError, match=r"VFL-6172.*0750"):
        make_authority(tmp_path / "certs")
    assert contents(tmp_path) == {}


def test_a_file_in_the_way_of_the_folder_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "certs"):
        with pytest.raises(ConfigError, match="VFL-6171"):
            make_authority(folder)


def test_nothing_is_overwritten_unasked(tmp_path):
    folder = tmp_path / "certs"
    make_authority(folder)
    issue(folder, "client-1")
    before = contents(folder)
    with pytest.raises(ConfigError, match="VFL-6173"):
        make_authority(folder)
    with pytest.raises(ConfigError, match="VFL-6173"):
        issue(folder, "client-1")
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["client-1.key", "client-1.pem", "ca.pem"])
def test_one_file_is_enough_to_refuse_even_a_dangling_link(name, tmp_path):
    folder = tmp_path / "certs"
    make_authority(folder)
    (folder / "client-1").mkdir(mode=0o700)
    (folder / "client-1" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="VFL-6173"):
        issue(folder, "client-1")
    assert os.listdir(folder / "client-1") == [name]
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_appears_in_between_is_not_overwritten(tmp_path):
    """The early check only improves the message: writing never replaces a file."""
    (tmp_path / "x.key").write_bytes(b"theirs")
    with pytest.raises(ConfigError, match="VFL-6173"):
        files.write(tmp_path / "x.key", b"ours", files.PRIVATE)
    assert contents(tmp_path) == {(tmp_path / "x.key").relative_to(tmp_path): b"theirs"}


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="VFL-6174"):
        files.write(tmp_path / "nowhere" / "x.key", b"ours", files.PRIVATE)


def test_overwriting_renews_the_party_and_leaves_the_others(tmp_path):
    folder = tmp_path / "certs"
    make_authority(folder)
    issue(folder, "client-1")
    issue(folder, "client-2")
    before = contents(folder)
    issue(folder, "client-1", overwrite=True)
    after = contents(folder)
    changed = {str(path) for path in after if after[path] != before.get(path)}
    assert changed == {"client-1/client-1.key", "client-1/client-1.pem"}
    assert after.keys() == before.keys()
    assert mode(folder / "client-1" / "client-1.key") == 0o600
    assert Credentials.load(folder / "client-1", "client-1").party == "client-1"


def test_a_new_authority_makes_the_old_certificates_worthless(tmp_path):
    folder = tmp_path / "certs"
    make_authority(folder)
    own = issue(folder, "client-1")
    make_authority(folder, overwrite=True)
    (own / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())
    with pytest.raises(ConfigError, match="VFL-6234"):
        Credentials.load(own, "client-1")


def test_the_authority_is_what_it_should_be(folder):
    certificate, now = pem.read_certificate(folder / "ca.pem"), datetime.now(UTC)
    assert isinstance(certificate.public_key().curve, ec.SECP256R1)
    limits = extension(certificate, x509.BasicConstraints)
    assert limits.critical
    assert limits.value == x509.BasicConstraints(ca=True, path_length=0)
    assert extension(certificate, x509.KeyUsage).value.key_cert_sign
    assert not extension(certificate, x509.KeyUsage).value.digital_signature
    assert timedelta(days=3649) < certificate.not_valid_after_utc - now <= timedelta(days=3650)
    certificate.verify_directly_issued_by(certificate)


def test_a_client_certificate_is_for_dialling_only_and_names_the_party_only(folder):
    certificate, now = pem.read_certificate(folder / "client-1" / "client-1.pem"), datetime.now(UTC)
    usage = extension(certificate, x509.ExtendedKeyUsage)
    assert usage.critical
    assert list(usage.value) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert extension(certificate, x509.BasicConstraints).value.ca is False
    names = extension(certificate, x509.SubjectAlternativeName).value
    assert list(names) == [x509.UniformResourceIdentifier("vafl:party/client-1")]
    assert certificate.not_valid_before_utc < now  # other clocks may be slow
    assert timedelta(days=824) < certificate.not_valid_after_utc - now <= timedelta(days=825)


def test_the_server_certificate_is_for_serving_only_under_all_its_names(tmp_path):
    make_authority(tmp_path / "certs")
    hosts = ["Fed.Example.org", "10.1.2.3", "fd00::7", "fed.example.org", "vafl-server"]
    own = issue(tmp_path / "certs", "server", hosts=hosts, days=1)
    certificate = pem.read_certificate(own / "server.pem")
    assert list(extension(certificate, x509.ExtendedKeyUsage).value) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert list(extension(certificate, x509.SubjectAlternativeName).value) == [
        x509.UniformResourceIdentifier("vafl:party/server"),
        x509.DNSName("vafl-server"),
        x509.DNSName("fed.example.org"),
        x509.IPAddress(ipaddress.ip_address("10.1.2.3")),
        x509.IPAddress(ipaddress.ip_address("fd00::7")),
    ]
    assert certificate.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=1)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "a b",
        "a:443",
        "vafl:party/client-1",
        "-a",
        "a-",
        "a..b",
        ".a",
        "*.example.org",
        "a\n",
        "[::1]",
        LONG_LABEL,
        LONG_NAME,
        "\u00fcmlaut.org",
    ],
)
def test_what_is_no_host_is_refused(host, tmp_path):
    make_authority(tmp_path / "certs")
    with pytest.raises(ConfigError, match="VFL-6153"):
        issue(tmp_path / "certs", "server", hosts=[host])
    assert not (tmp_path / "certs" / "server").exists()


def test_a_client_has_no_hosts(tmp_path):
    make_authority(tmp_path / "certs")
    with pytest.raises(ConfigError, match=r"VFL-6152.*here\.org.*client\-1"):
        issue(tmp_path / "certs", "client-1", hosts=["here.org"])


@pytest.mark.parametrize("days", [-1, 0, 3650, 10**9])
def test_a_certificate_must_end_before_its_authority(days, tmp_path):
    make_authority(tmp_path / "certs")
    with pytest.raises(ConfigError, match=rf"VFL-6151.*3649 days left.*Found {days} days"):
        issue(tmp_path / "certs", "client-1", days=days)
    assert not (tmp_path / "certs" / "client-1").exists()


@pytest.mark.parametrize("name", ["ca.pem", "ca.key"])
def test_issuing_needs_the_whole_authority(name, tmp_path):
    make_authority(tmp_path / "certs")
    (tmp_path / "certs" / name).unlink()
    with pytest.raises(ConfigError, match=rf"VFL-6175.*{name}"):
        issue(tmp_path / "certs", "client-1")


def test_issuing_needs_an_authority_that_fits_its_key(tmp_path, other_folder, folder):
    make_authority(tmp_path / "certs")
    (tmp_path / "certs" / "ca.pem").write_bytes((other_folder / "ca.pem").read_bytes())
    with pytest.raises(ConfigError, match="VFL-6233"):
        issue(tmp_path / "certs", "client-1")
    (tmp_path / "certs" / "ca.pem").write_bytes((folder / "client-1" / "client-1.pem").read_bytes())
    with pytest.raises(ConfigError, match="VFL-6235"):
        issue(tmp_path / "certs", "client-1")


def test_an_authority_key_open_to_others_signs_nothing(tmp_path):
    make_authority(tmp_path / "certs")
    (tmp_path / "certs" / "ca.key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"VFL-6176.*0640"):
        issue(tmp_path / "certs", "client-1")


@pytest.mark.parametrize(("begin", "end", "words"), [(-9, -2, "expired"), (2, 9, "not valid yet")])
def test_an_authority_out_of_date_signs_nothing(begin, end, words, tmp_path):
    make_authority(tmp_path / "certs")
    path, now = tmp_path / "certs" / "ca.pem", datetime.now(UTC)
    old, key = pem.read_certificate(path), pem.read_key(tmp_path / "certs" / "ca.key")
    builder = x509.CertificateBuilder(
        old.issuer,
        old.subject,
        key.public_key(),
        old.serial_number,
        now + timedelta(days=begin),
        now + timedelta(days=end),
        list(old.extensions),
    )
    path.write_bytes(pem.certificate_to_pem(builder.sign(key, SHA256())))
    with pytest.raises(ConfigError, match=rf"VFL-6236.*ca\.pem.*{words}"):
        issue(tmp_path / "certs", "client-1", days=1)
