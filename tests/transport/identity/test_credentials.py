"""`Credentials.load` refuses wrong files, and says the rule, the value found and the remedy."""

import re
import shutil
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from vafl.errors import ConfigError
from vafl.transport.identity import Credentials, pem


@pytest.fixture
def own(folder, tmp_path):
    """A copy of client-1's folder that a test may damage."""
    return shutil.copytree(folder / "client-1", tmp_path / "own")


def install(credentials, path):
    """Write credentials, right or wrong, as a party's files."""
    (path / f"{credentials.party}.pem").write_bytes(credentials.certificate)
    (path / f"{credentials.party}.key").write_bytes(credentials.key)


def refusal_of(own, **options):
    with pytest.raises(ConfigError) as caught:
        Credentials.load(own, "client-1", **options)
    return str(caught.value)


def test_good_files_load_and_the_key_stays_out_of_sight(own):
    loaded = Credentials.load(own, "client-1")
    assert loaded.party == "client-1"
    assert loaded.authority == (own / "ca.pem").read_bytes()
    assert loaded.certificate == (own / "client-1.pem").read_bytes()
    assert loaded.key == (own / "client-1.key").read_bytes()
    assert repr(loaded) == "Credentials(party='client-1')"


@pytest.mark.parametrize("name", ["ca.pem", "client-1.pem", "client-1.key"])
def test_a_missing_file(name, own):
    (own / name).unlink()
    message = refusal_of(own)
    assert f'{name}" must be a file this user can read. Found: No such file' in message
    assert "`vafl certs`" in message


@pytest.mark.parametrize(
    "content", [b"", b"\xff\x00", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
@pytest.mark.parametrize("name", ["ca.pem", "client-1.pem"])
def test_a_certificate_that_is_none(name, content, own):
    (own / name).write_bytes(content)
    assert f'{name}" must hold one certificate in PEM form. Found none' in refusal_of(own)


def test_two_authorities_in_one_file_are_refused(own, other_folder):
    """gRPC would trust both certificates, but only the first would be checked."""
    with (own / "ca.pem").open("ab") as file:
        file.write((other_folder / "ca.pem").read_bytes())
    assert "must hold one certificate in PEM form. Found 2" in refusal_of(own)


def test_a_key_that_is_none_or_of_another_kind(own):
    (own / "client-1.key").write_bytes(b"nothing")
    assert "must hold an elliptic-curve private key in PEM form" in refusal_of(own)
    key = ed25519.Ed25519PrivateKey.generate()
    (own / "client-1.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert "Found Ed25519PrivateKey" in refusal_of(own)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o777])
def test_a_key_open_to_others(mode, own):
    (own / "client-1.key").chmod(mode)
    message = refusal_of(own)
    assert f"must be readable by its owner only. Found mode {mode:04o}. Run: chmod 600" in message


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_key_of_its_owner_alone(mode, own):
    (own / "client-1.key").chmod(mode)
    assert Credentials.load(own, "client-1").party == "client-1"


def test_another_certificates_key(own, folder):
    shutil.copy(folder / "client-2" / "client-2.key", own / "client-1.key")
    assert re.search(r"VFL-6233.*client-1\.key", refusal_of(own))


def test_another_authority(own, other_folder):
    shutil.copy(other_folder / "ca.pem", own / "ca.pem")
    message = refusal_of(own)
    assert re.search(r"VFL-6234.*client-1\.pem", message)
    assert message.count("CN=vafl authority ") == 2


def test_an_authority_that_does_not_say_it_is_one(own, forge):
    (own / "ca.pem").write_bytes(forge("client-2").certificate)
    assert 'must be an authority\'s certificate. Found "CN=client-2"' in refusal_of(own)


def test_a_party_as_its_own_authority(own):
    shutil.copy(own / "client-1.pem", own / "ca.pem")
    assert 'must be an authority\'s certificate. Found "CN=client-1"' in refusal_of(own)


def test_an_expired_certificate_says_the_dates(own):
    now = pem.read_certificate(own / "client-1.pem").not_valid_after_utc + timedelta(days=3)
    message = refusal_of(own, now=now)
    assert re.search(r"VFL-6236.*client-1\.pem.*expired", message)
    assert f"to {now - timedelta(days=3):%Y-%m-%d %H:%M} UTC" in message
    assert f"clock says {now:%Y-%m-%d %H:%M} UTC" in message
    assert "`vafl certs --overwrite`" in message
    with pytest.raises(ConfigError, match=r"VFL-6236.*client\-1\.pem.*expired"):
        Credentials.load(own, "client-1").require_in_date(now=now)


def test_a_certificate_of_tomorrow_says_the_dates(own):
    now = pem.read_certificate(own / "client-1.pem").not_valid_before_utc - timedelta(seconds=1)
    authority_begins = pem.read_certificate(own / "ca.pem").not_valid_before_utc
    message = refusal_of(own, now=min(now, authority_begins - timedelta(seconds=1)))
    assert re.search(r"VFL-6236.*not valid yet", message)


def test_the_first_and_the_last_second_count(own):
    certificate = pem.read_certificate(own / "client-1.pem")
    for now in (certificate.not_valid_before_utc, certificate.not_valid_after_utc):
        assert Credentials.load(own, "client-1", now=now).party == "client-1"


def test_an_authority_that_has_ended(own):
    assert re.search(r"VFL-6236.*ca\.pem", refusal_of(own, now=datetime.now(UTC) + timedelta(days=4000)))


@pytest.mark.parametrize(("begin", "end", "words"), [(-2, -1, "expired"), (1, 2, "not valid yet")])
def test_the_clock_is_the_machines_own_unless_told(begin, end, words, own, forge):
    install(forge(begin=begin, end=end), own)
    assert re.search(rf"VFL-6236.*client-1\.pem.*{words}", refusal_of(own))


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        ([ExtendedKeyUsageOID.SERVER_AUTH], "Found one for serving"),
        (
            [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH],
            "Found one for dialling, serving",
        ),
        ([ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE], "Found one for 2.5.29.37.0"),
        ([], "Found one for any use"),
    ],
)
def test_a_certificate_for_another_use(usage, words, own, forge):
    install(forge(usage=usage), own)
    message = refusal_of(own)
    assert "must be for dialling only" in message
    assert words in message


def test_another_partys_certificate_under_this_partys_name(own, folder):
    for ending in ("pem", "key"):
        shutil.copy(folder / "client-2" / f"client-2.{ending}", own / f"client-1.{ending}")
    message = refusal_of(own)
    assert "must name the party as vafl:party/client-1, and no other. Found vafl:party/client-2" in message


def test_a_certificate_that_names_nobody(own, forge):
    install(forge(names=[]), own)
    assert "Found no name" in refusal_of(own)


def test_a_bad_name_is_refused_before_any_file_is_read(own):
    with pytest.raises(ConfigError, match="VFL-1051"):
        Credentials.load(own, "../client-1")


def test_each_end_has_its_own_credentials(load):
    with pytest.raises(ConfigError, match=r"VFL-6161.*server.*client\-1"):
        load("client-1").server_credentials()
    with pytest.raises(ConfigError, match=r"VFL-6162.*server"):
        load("server").channel_credentials()
