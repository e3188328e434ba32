"""A server that cannot listen says why, and leaves nothing behind that would hinder the next attempt."""

import socket

import pytest

from vafl.cli import main
from vafl.errors import ConfigError
from vafl.transport.grpc.admission import require_free
from vafl.transport.grpc.connection import Connection

TABLES = """
[data]
name = "parties"
parties = ["bank"]
[parties.server.source]
path = "labels.csv"
id = "customer"
label = "paid"
[network]
security = "plaintext"
"""


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield f"127.0.0.1:{other.getsockname()[1]}"


@pytest.mark.parametrize("command", ["server", "up"])
def test_a_port_in_use_is_one_error_and_the_run_folder_is_not_made(command, taken, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(f'[data]\nname = "iris"\n[network]\naddress = "{taken}"\n')
    chosen = ["--set", "network.security=plaintext", "--out", str(tmp_path / "run")]
    assert main([command, str(tmp_path / "run.toml"), *chosen]) == 2
    assert f'Found "{taken}": Address already in use.' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_alignment_at_a_port_in_use_is_one_error(taken, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(f'{TABLES}address = "{taken}"\n')
    (tmp_path / "labels.csv").write_text("customer,paid\n1,no\n2,yes\n")
    assert main(["align", str(tmp_path / "run.toml"), "--party", "server"]) == 2
    assert f'Found "{taken}": Address already in use.' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("192.0.2.1:7443", r"VFL-6101.*7443"),
        ("127.0.0.1:70000", r"VFL-6101.*no such port"),
        (f"{'a' * 70}.invalid:7443", "VFL-6101"),
    ],
)
def test_an_address_that_is_not_of_this_machine_is_named_with_the_remedy(address, why):
    with pytest.raises(ConfigError, match=why):
        require_free(address)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "0.0.0.0:0"])
def test_what_is_free_is_let_pass(address):
    require_free(address)


def test_silence_counts_from_when_it_was_the_clients_turn(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("vafl.transport.grpc.connection.time.monotonic", lambda: now[0])
    connection = Connection(None, 0, "bank")
    connection.send(b"")
    now[0] = 3.0
    assert connection.silence == 3.0
    connection.note_heard()
    now[0] = 20.0
    assert connection.silence == 0.0  # the server is busy
    connection.note_handled()
    connection.send(b"")
    now[0] = 25.0
    connection.send(b"")  # gives the client no more time
    now[0] = 31.0
    assert connection.silence == 11.0
