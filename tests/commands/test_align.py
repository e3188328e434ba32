"""`vafl align`: what it refuses before it opens a connection, and all parties on one machine."""

import polars as pl
import pytest

from vafl.cli import main
from vafl.data.alignment.rows import Alignment

CONFIG = """
[data]
name = "parties"
parties = ["bank"]
[parties.server.source]
path = "labels.csv"
id = "customer"
label = "paid"
[parties.bank.source]
path = "bank.csv"
id = "customer"
[network]
address = "127.0.0.1:0"
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "labels.csv").write_text("customer,paid\n1,no\n2,yes\n3,no\n4,yes\n")
    (tmp_path / "bank.csv").write_text("customer,age\n3,30\n1,10\n2,20\n9,90\n")
    return tmp_path


def refused(capsys, folder, *options):
    """Return the exit code and the error of an alignment that cannot begin."""
    code = main(["align", str(folder / "run.toml"), *options])
    assert not list(folder.glob("*.alignment.parquet"))
    return code, capsys.readouterr().err


def test_a_party_that_is_not_in_the_configuration(capsys, folder):
    code, words = refused(capsys, folder, "--party", "shop")
    assert code == 2
    assert all(part in words for part in ("VFL-7012", "server, bank", '"shop"'))


def test_a_party_without_a_table(capsys, folder):
    (folder / "run.toml").write_text(
        CONFIG.replace("[parties.bank.source]", "[parties.server2.source]").split("[parties.s")[0]
    )
    code, words = refused(capsys, folder, "--party", "bank")
    assert code == 2
    assert "needs a section [parties.bank.source]" in words


def test_data_that_needs_no_alignment(capsys, folder):
    (folder / "run.toml").write_text("")
    code, words = refused(capsys, folder, "--party", "server")
    assert code == 2
    assert 'alignment is for data.name = "parties"' in words


def test_mutual_tls_needs_certificates(capsys, folder):
    code, words = refused(capsys, folder, "--party", "bank")
    assert code == 2
    assert "network.certificates" in words


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("customer,age\n3,30\n1,10\n3,20\n", 'id must be unique. Found 1 in "customer" more than once: 3'),
        ("customer,age\n3,30\n,10\n", "every record needs an id. Found 1 without one"),
        ("client,age\n3,30\n", 'has no column "customer"'),
        ("", "bank.csv"),
    ],
)
def test_ids_that_cannot_be_used(capsys, folder, content, message):
    (folder / "bank.csv").write_text(content)
    code, words = refused(capsys, folder, "--party", "bank", "--set", "network.security=plaintext")
    assert code == 3
    assert message in words


def test_everybody_on_one_machine(capsys, folder):
    """A missing file, or a client that cannot begin, is reported before any process starts."""
    whole = (folder / "bank.csv").read_text()
    (folder / "bank.csv").unlink()
    code, words = refused(capsys, folder, "--all")
    assert code == 3
    assert "bank.csv" in words
    (folder / "bank.csv").write_text(whole + "9,91\n")
    code, words = refused(capsys, folder, "--all")
    assert code == 4
    assert "bank ended with exit code 3" in words
    assert "must be unique" in words
    (folder / "bank.csv").write_text(whole)
    assert main(["align", str(folder / "run.toml"), "--all"]) == 0
    server, bank = (Alignment.read(folder / f"{name}.alignment.parquet") for name in ("server", "bank"))
    assert server.token == bank.token
    assert sorted(bank.ids) == ["1", "2", "3"]
    assert bank.ids.to_list() == server.ids.to_list()
    assert pl.read_parquet(folder / "bank.alignment.parquet").columns == ["id", "row"]


def test_a_folder_that_is_not_there_is_named_before_anything_is_computed(capsys, folder):
    """Otherwise the server would have a new alignment and the client none."""
    elsewhere = "parties.bank.source.alignment=nowhere/bank.parquet"
    code, words = refused(capsys, folder, "--all", "--set", elsewhere)
    assert code == 3
    assert "VFL-2060" in words
    assert "nowhere" in words


def test_a_file_that_is_no_alignment_is_never_replaced_by_one(capsys, folder):
    table = (folder / "labels.csv").read_bytes()
    onto = f"parties.server.source.alignment={folder / 'labels.csv'}"
    for who in (["--all"], ["--party", "server"]):
        words = refused(capsys, folder, *who, "--set", onto)
        assert words[0] == 3
        assert "VFL-2061" in words[1]
    assert (folder / "labels.csv").read_bytes() == table
