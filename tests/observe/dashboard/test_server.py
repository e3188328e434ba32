"""The dashboard on a real socket."""

import http.client
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

from tests.observe.dashboard.folders import written
from tests.waiting import LIMIT, until
from vafl.observe.dashboard import server
from vafl.observe.dashboard.server import Dashboard
from vafl.transport.identity import HttpAddress


@contextmanager
def serving(folder, host="127.0.0.1") -> Iterator[Dashboard]:
    with Dashboard([folder], HttpAddress(host, 0)) as dashboard:
        Thread(target=dashboard.serve_forever, args=(0.01,), daemon=True).start()
        yield dashboard
        dashboard.shutdown()


def asked(dashboard, path, host="localhost"):
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=10)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode()


def test_runs_that_begin_later_are_shown_too(tmp_path):
    with serving(tmp_path) as dashboard:
        assert json.loads(asked(dashboard, "/runs.json")[2]) == {"runs": [], "others": 0}
        written(tmp_path / "run", share=0.4)
        (run,) = json.loads(asked(dashboard, "/runs.json?again")[2])["runs"]
        assert (run["name"], run["state"]) == ("run", "running")
        assert [client["name"] for client in run["status"]["clients"]] == ["bank", "shop"]
        assert "vafl_run_up" in asked(dashboard, "/metrics")[2]


def test_a_folder_whose_name_is_no_text_is_shown_with_the_others(tmp_path):
    written(tmp_path / os.fsdecode(b"run-\xff"), share=0.4)
    with serving(tmp_path) as dashboard:
        assert [asked(dashboard, path)[0] for path in ("/runs.json", "/metrics")] == [200, 200]


def test_the_page_is_all_its_own(tmp_path):
    with serving(tmp_path) as dashboard:
        status, headers, page = asked(dashboard, "/")
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        for part in ("page.css", "page.js"):
            assert part in page
            assert asked(dashboard, f"/{part}")[0] == 200
        assert "http" not in page  # the page loads nothing from other sites


@pytest.mark.parametrize("path", ["/nothing", "/../views.py", "/page.html"])
def test_nothing_else_is_there(tmp_path, path):
    with serving(tmp_path) as dashboard:
        assert asked(dashboard, path)[0] == 404


@pytest.mark.parametrize("host", ["else.example", "else.example:80", "", "localhost.else.example"])
def test_another_name_for_this_machine_is_refused(tmp_path, host):
    """DNS rebinding: the name of another site may resolve to this address, and the browser allows that."""
    with serving(tmp_path) as dashboard:
        assert asked(dashboard, "/runs.json", host)[0] == 403


def test_a_failure_is_said_and_does_not_end_it(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    with serving(folder) as dashboard:
        folder.rmdir()
        assert asked(dashboard, "/runs.json")[0] == 500
        folder.mkdir()
        assert asked(dashboard, "/runs.json")[0] == 200


def test_beyond_loopback_it_answers_to_addresses_and_to_the_name_it_was_given(tmp_path):
    with serving(tmp_path, "0.0.0.0") as dashboard:
        for host in ("127.0.0.1", "192.0.2.7:8090", "localhost"):
            assert asked(dashboard, "/runs.json", host)[0] == 200
        assert asked(dashboard, "/runs.json", "else.example")[0] == 403


def test_headers_that_never_end_are_hung_up_on_although_bytes_come(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_HEADERS_PATIENCE", 1.0)
    with serving(tmp_path) as dashboard:
        with socket.create_connection(("127.0.0.1", dashboard.port), timeout=0.1) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\nX-Half: ")
            for _ in range(int(LIMIT / 0.1)):
                try:
                    raw.sendall(b"x")
                    if not raw.recv(1):
                        break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
            else:
                pytest.fail("the connection was never closed")
        assert asked(dashboard, "/")[0] == 200


def test_connections_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)
    with serving(tmp_path) as dashboard:
        held = [socket.create_connection(("127.0.0.1", dashboard.port), timeout=LIMIT) for _ in range(2)]
        with socket.create_connection(("127.0.0.1", dashboard.port), timeout=LIMIT) as third:
            assert third.recv(1) == b""
        for each in held:
            each.close()
        until(lambda: _is_answered(dashboard), "room for another")


def _is_answered(dashboard):
    try:
        return asked(dashboard, "/")[0] == 200
    except (http.client.HTTPException, ConnectionError):
        return False
