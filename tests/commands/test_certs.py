"""`vafl certs` as a user starts it."""

import pytest

from vafl.cli import main
from vafl.transport.identity import Credentials


@pytest.fixture
def certs(tmp_path, capsys):
    """Run the command on one folder; return the exit code and its output in one line."""

    def run(*arguments):
        code = main(["certs", str(tmp_path / "certs"), *arguments])
        captured = capsys.readouterr()
        return code, " ".join((captured.out + captured.err).split())

    return run


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_makes_the_authority_and_a_folder_for_each_party(certs, tmp_path):
    code, printed = certs(
        "--party", "server", "--party", "client-1", "--host", "fed.example.org", "--days", "90"
    )
    assert code == 0
    folder = tmp_path / "certs"
    expected = {"ca.pem", "ca.key"}
    for party in ("server", "client-1"):
        expected |= {f"{party}/ca.pem", f"{party}/{party}.pem", f"{party}/{party}.key"}
        assert Credentials.load(folder / party, party).party == party
    assert files(folder).keys() == expected
    for name in expected:
        assert name in printed
    assert "client-1, in secret" in printed
    assert "ca.key offline" in printed


def test_adds_a_party_with_the_same_authority(certs, tmp_path):
    certs("--party", "server")
    before = files(tmp_path / "certs")
    code, printed = certs("--party", "client-1", "--party", "client-1")
    after = files(tmp_path / "certs")
    assert code == 0
    assert {name: after[name] for name in before} == before
    assert after["client-1/ca.pem"] == before["ca.pem"]
    assert "server/server.key" not in printed


def test_refuses_everything_if_one_party_has_files(certs, tmp_path):
    certs("--party", "client-1")
    before = files(tmp_path / "certs")
    code, printed = certs("--party", "client-2", "--party", "client-1")
    assert code == 2
    assert 'client-1.key" exists and is left as it is' in printed
    assert files(tmp_path / "certs") == before


def test_overwrites_when_told_but_never_the_authority(certs, tmp_path):
    certs("--party", "client-1")
    before = files(tmp_path / "certs")
    assert certs("--party", "client-1", "--overwrite")[0] == 0
    after = files(tmp_path / "certs")
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"client-1/client-1.pem", "client-1/client-1.key"}


def test_does_not_replace_an_authority_whose_key_is_kept_offline(certs, tmp_path):
    certs("--party", "client-1")
    (tmp_path / "certs" / "ca.key").unlink()
    before = files(tmp_path / "certs")
    code, printed = certs("--party", "client-2")
    assert code == 2
    assert 'ca.key" must be a file this user can read' in printed
    assert files(tmp_path / "certs") == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--party", "a/b"], "a party's name must be"),
        (["--party", "[/x]"], "Found '[/x]'"),
        (["--party", "client-1", "--host", "here.org"], "--host is for the server's certificate"),
        (["--party", "Server"], "must not be one of"),
    ],
)
def test_bad_arguments_write_nothing(arguments, words, certs, tmp_path):
    code, printed = certs(*arguments)
    assert code == 2
    assert words in printed
    assert not (tmp_path / "certs").exists()


@pytest.mark.parametrize(("option", "value"), [("--days", "0"), ("--host", "a b")])
def test_a_certificate_that_cannot_be_issued_is_refused_before_any_is(option, value, certs, tmp_path):
    code, printed = certs("--party", "bank", "--party", "server", option, value)
    assert code == 2
    assert "must" in printed
    assert not (tmp_path / "certs").exists()
