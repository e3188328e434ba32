"""A federation on one machine reports at once why it cannot start (test_demo.py has successful runs)."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
from rich.console import Console

from tests.companies import document, write_companies
from tests.waiting import LIMIT, until
from vafl.cli import main
from vafl.config import from_document
from vafl.errors import ConfigError, RunError, RunFolderError, VaflError
from vafl.folders import HeldFolder
from vafl.run.credentials import load_credentials
from vafl.run.processes import Clients
from vafl.run.up import up
from vafl.transport.identity import SERVER, issue, make_authority


def configuration(**network):
    return from_document(
        {
            "data": {"name": "iris"},
            "stop": {"updates": 40},
            "network": {"address": "127.0.0.1:0", "join_timeout": 100.0, **network},
        }
    )


def quiet():
    return Console(file=io.StringIO())


def test_a_client_that_cannot_begin_ends_the_run_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("vafl.run.up.check_certificates", lambda *_: None)
    make_authority(tmp_path / "certs")
    for party in (SERVER, "client-1"):
        issue(tmp_path / "certs", party)
    with pytest.raises(RunError, match=r"VFL-7191.*client\-2.*2"):
        up(
            configuration(certificates=str(tmp_path / "certs"), join_timeout=3600.0),
            tmp_path / "run",
            quiet(),
        )
    assert (
        "window = 2" in (tmp_path / "run" / "config.toml").read_text()
    )  # the window that separate processes use


def test_a_client_that_was_killed_is_left_to_the_runs_rules(tmp_path):
    clients = Clients(["client-1"], tmp_path, ["client", "--out", str(tmp_path)])
    (tmp_path / "config.toml").write_text("")
    clients.start("127.0.0.1:1")
    os.kill(clients._processes["client-1"].pid, signal.SIGKILL)
    clients._processes["client-1"].wait()
    clients.check()


@pytest.fixture
def ending(tmp_path):
    """Clients whose run is over, replaced by short scripts."""
    clients = Clients([], tmp_path, [])
    (tmp_path / "logs").mkdir()

    def start(name, script):
        (tmp_path / "logs" / f"{name}.log").write_text("no room on the disk")
        clients._processes[name] = subprocess.Popen([sys.executable, "-c", script])
        return clients

    yield start
    clients.kill()


def test_a_client_that_works_is_waited_for_however_slow_it_is(ending, tmp_path):
    """It uses CPU time for many times the patience, like a client on a busy machine."""
    script = f"import time\nwhile time.process_time() < 1.0: pass\nopen({str(tmp_path / 'model')!r}, 'w')"
    ending("one", script).end(patience=0.1)
    assert (tmp_path / "model").exists()


def test_a_client_that_does_nothing_is_killed_and_named(ending, tmp_path):
    clients = ending("one", f"import time; open({str(tmp_path / 'up')!r}, 'w'); time.sleep(1e6)")
    until((tmp_path / "up").exists, "the client")
    with pytest.raises(RunError, match=r"VFL-7191.*one.*\-9"):
        clients.end(patience=0.5)


def test_a_client_that_fails_at_the_end_leaves_the_others_time_to_keep_their_models(ending, tmp_path):
    ending("one", "import sys; sys.exit(3)")
    clients = ending("two", f"import time; time.sleep(1.0); open({str(tmp_path / 'two')!r}, 'w')")
    with pytest.raises(RunError, match=r"VFL-7191.*one.*3"):
        clients.end()
    assert (tmp_path / "two").exists()


def test_the_trial_on_one_machine_needs_no_certificates_that_are_configured_but_not_made(
    tmp_path, caplog, capsys
):
    write_companies(tmp_path)
    tables = {SERVER: "labels.csv", "bank": "bank.csv", "shop": "shop.parquet"}
    given = [word for name, file in tables.items() for word in ("--table", f"{name}={tmp_path / file}")]
    assert main(["init", *given, "--out", str(tmp_path / "vafl.toml")]) == 0
    assert "reveal the training labels" in " ".join(capsys.readouterr().out.split())
    assert "[labels]" in (tmp_path / "vafl.toml").read_text()
    chosen = ["--set", "network.address=127.0.0.1:0", "--set", "stop.updates=40"]
    assert main(["up", str(tmp_path / "vafl.toml"), "--out", str(tmp_path / "run"), *chosen]) == 0
    assert (tmp_path / "run" / "certs" / "ca.pem").is_file()
    assert "reveal the training labels" in caplog.text


@pytest.mark.parametrize("command", ["up", "align"])
def test_a_clients_missing_certificate_is_a_wrong_configuration_wherever_it_is_found(
    tmp_path, capsys, command
):
    """The exit code is that of `vafl client`."""
    write_companies(tmp_path)
    path = tmp_path / "run.toml"
    network = {"address": "127.0.0.1:0", "certificates": "certs"}
    path.write_text(tomli_w.dumps(document(tmp_path, network=network)))
    make_authority(tmp_path / "certs")
    for party in (SERVER, "bank"):
        issue(tmp_path / "certs", party)
    before = set(tmp_path.iterdir())
    options = {"up": ["--out", str(tmp_path / "run")], "align": ["--all"]}[command]
    assert main([command, str(path), *options]) == 2
    assert "shop.pem" in capsys.readouterr().err
    assert set(tmp_path.iterdir()) == before


def test_a_folder_of_certificates_that_may_not_be_read_is_a_wrong_configuration(tmp_path, monkeypatch):
    def forbidden(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", forbidden)
    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(ConfigError, match=r"VFL-6175.*Permission denied"):
        load_credentials(configuration(certificates=str(tmp_path)), SERVER)


def test_certificates_that_cannot_be_used_are_named_before_the_folder_is_made(tmp_path):
    (tmp_path / "certs").mkdir()
    for network in ({}, {"address": "0.0.0.0:0", "certificates": str(tmp_path / "nowhere")}):
        with pytest.raises(VaflError, match="VFL-6175"):
            up(
                configuration(**{"certificates": str(tmp_path / "certs"), **network}),
                tmp_path / "run",
                quiet(),
            )
        assert not (tmp_path / "run").exists()


@pytest.fixture
def endless(tmp_path):
    """A federation that trains without end, in a separate process group, as a terminal starts it."""
    (tmp_path / "run.toml").write_text(
        configuration().to_toml().replace("updates = 40", "updates = 10000000")
    )
    command = [sys.executable, "-m", "vafl.cli", "up", "run.toml", "--out", "run"]
    with (tmp_path / "log").open("wb") as log:
        parent = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    history = tmp_path / "run" / "history.jsonl"
    until(
        lambda: history.exists() and len(history.read_text().splitlines()) > 1,
        "a second evaluation",
        (tmp_path / "log").read_text,
    )
    yield parent
    parent.kill()
    parent.wait()


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def is_free(folder):
    try:
        HeldFolder(folder).close()
    except RunFolderError:
        return False
    return True


def test_ctrl_c_in_a_terminal_ends_the_run_in_order_with_every_model(endless, tmp_path):
    os.killpg(endless.pid, signal.SIGINT)
    assert endless.wait(LIMIT) == 130, (tmp_path / "log").read_text()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["interrupted"]
    kept = {path.parent.name for path in (tmp_path / "run").glob("models/*/model.safetensors")}
    assert kept == {SERVER, "client-1", "client-2"}


def is_overdue(run):
    """Return whether the updates since the last evaluation show that the next one is under way."""
    last = json.loads((run / "history.jsonl").read_text().splitlines()[-1])
    made = json.loads((run / "status.json").read_text())["updates"]
    return made >= last["updates"] + 2 * configuration().evaluation.every


def test_a_second_ctrl_c_ends_all_though_a_client_does_not_answer(endless, tmp_path):
    clients = [int(pid) for pid in children(endless.pid)]
    os.kill(clients[0], signal.SIGSTOP)
    until(lambda: is_overdue(tmp_path / "run"), "an evaluation that waits for it")
    os.killpg(endless.pid, signal.SIGINT)
    until(lambda: "signal again" in " ".join((tmp_path / "log").read_text().split()), "the first Ctrl-C")
    os.killpg(endless.pid, signal.SIGINT)
    assert endless.wait(LIMIT) == 130, (tmp_path / "log").read_text()
    told = (tmp_path / "run" / "logs" / "client-2.log").read_text()
    assert "without a result: the server was stopped at once" in " ".join(told.split())
    assert all(is_free(tmp_path / "run" / "state" / f"client-{n}") for n in (1, 2))


def test_clients_end_with_a_parent_that_is_killed(endless, tmp_path):
    endless.kill()
    for name in ("client-1", "client-2"):
        until(lambda name=name: is_free(tmp_path / "run" / "state" / name), f"the end of {name}")
