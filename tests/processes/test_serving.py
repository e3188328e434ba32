"""A served model as real processes over mutual TLS: many callers at once, and a client that is killed."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tests.processes.test_federation import PARTIES, Machine
from tests.waiting import LIMIT
from vafl.cli import main

CONFIG = """
[data]
name = "iris"
[stop]
updates = 60
[network]
address = "127.0.0.1:{port}"
certificates = "certs"
heartbeat = 2.0
join_timeout = 100.0
[prediction]
deadline = 20.0
"""


class Serving(Machine):
    """A trained model, and the processes that serve it."""

    def __init__(self, folder):
        super().__init__(folder, CONFIG)
        assert main(["run", str(folder / "run.toml"), "--out", str(folder / "model")]) == 0

    def start(self, party, *options):
        command = [sys.executable, "-m", "vafl.cli", "serve", str(self.folder / "run.toml")]
        own = ["--party", party, "--model", str(self.folder / "model"), *options]
        with (self.folder / f"{party}.log").open("ab") as log:
            self.processes[party] = subprocess.Popen(
                [*command, *own], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def address(self):
        found = re.search(r"http://127\.0\.0\.1:\d+", self.log("server"))
        return found and found[0]

    def ask(self, path, body=None):
        request = urllib.request.Request(
            self.address() + path, body, {"Content-Type": "application/json"} if body else {}
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def door(self):
        host, port = self.address().removeprefix("http://").split(":")
        return host, int(port)

    def is_closed(self):
        """Return whether the server accepts no new connections."""
        try:
            socket.create_connection(self.door(), timeout=LIMIT).close()
        except ConnectionError:  # refused, or reset if it is just closing
            return True
        return False

    def predict(self, *ids):
        return self.ask("/predict", json.dumps({"ids": ids}).encode())


@pytest.fixture
def serving(tmp_path):
    made = Serving(tmp_path)
    yield made
    made.end()


def test_a_client_killed_in_the_middle_is_flagged_and_the_answers_go_on(serving, capsys):
    _check_addresses(serving, capsys)
    serving.start("server", "--http", "127.0.0.1:0")
    for party in PARTIES:
        serving.start(party)
    serving.until(serving.address, "an address")
    serving.until(lambda: serving.ask("/health")[1]["status"] == "ok", "everybody here")
    _check_errors(serving)

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(serving.predict, number, str(number + 1)) for number in range(60)]
        asked[20].result()
        serving.kill("client-2")
        answers = [each.result() for each in asked]
    assert {status for status, _ in answers} == {200}
    lines = [line for _, answer in answers for line in answer["predictions"]]
    for line in lines:
        assert sum(line["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert line["missing"] in ({}, {"client-2": "absent"})
    assert any(answer["complete"] for _, answer in answers)

    serving.until(lambda: serving.ask("/health")[1]["parties"]["client-2"] == "gone", "the death noticed")
    began = time.monotonic()
    status, answer = serving.predict(140)
    assert (status, answer["complete"]) == (200, False)
    assert answer["predictions"][0]["missing"] == {"client-2": "absent"}
    assert time.monotonic() - began < 10, "nobody waits for the dead until the deadline"
    assert serving.predict(0)[1]["complete"], "what was kept needs nobody"

    serving.start("client-2")
    serving.until(lambda: serving.ask("/health")[1]["status"] == "ok", "the client back")
    assert serving.predict(140)[1]["complete"]
    serving.processes["client-2"].send_signal(signal.SIGSTOP)
    with closing(
        http.client.HTTPConnection(serving.address().removeprefix("http://"), timeout=LIMIT)
    ) as last:
        last.request("POST", "/predict", json.dumps({"ids": [141]}), {"Content-Type": "application/json"})
        assert serving.ask("/health")[0] == 200, "so it has read what was asked before"
        serving.processes["server"].terminate()
        serving.until(serving.is_closed, "the doors closed")
        serving.processes["client-2"].send_signal(signal.SIGCONT)
        assert json.load(last.getresponse())["complete"], "what was asked before the end is answered"
    for party in ("server", *PARTIES):
        assert serving.wait(party) == 0, serving.log(party)[-2000:]


def _check_errors(serving):
    """Every wrong request gets an error response in JSON."""
    wrong = [
        (b"{", 400, "bad_json"),
        (b"[" * 100_000, 400, "bad_json"),
        (b'{"ids": []}', 400, "bad_request"),
        (b'{"ids": [true]}', 400, "bad_request"),
        (b'{"ids": ["nobody"]}', 404, "unknown_ids"),
        (json.dumps({"ids": list(range(1001))}).encode(), 413, "too_many_ids"),
        (b" " * 1_000_000, 413, "too_large"),
    ]
    for body, status, kind in wrong:
        found, answer = serving.ask("/predict", body)
        assert (found, answer["error"]["type"]) == (status, kind)
    assert serving.ask("/predict")[1]["error"]["type"] == "method_not_allowed"
    assert serving.ask("/elsewhere")[1]["error"]["type"] == "not_found"


def _check_addresses(serving, capsys):
    """Check the errors for addresses that cannot be used."""
    command = ["serve", str(serving.folder / "run.toml"), "--model", str(serving.folder / "model"), "--http"]
    assert main([*command, "8080"]) == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([*command, address := f"127.0.0.1:{taken.getsockname()[1]}"]) == 2
    assert address in capsys.readouterr().err.replace("\n", " ")
