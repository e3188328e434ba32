"""`vafl serve` as real processes: what callers with and without a key can do."""

import asyncio
import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import sys
from contextlib import ExitStack, closing

import pytest
from aiohttp import web

from tests.machine import PARTIES, Machine
from tests.prometheus import parse
from tests.waiting import LIMIT, until
from vafl.cli import main
from vafl.errors import ConfigError
from vafl.run.api_access import Access
from vafl.run.http import MOST_CONNECTIONS, HttpServer
from vafl.transport.identity import SERVER_NAME, HttpAddress, Https, make_authority

CONFIG = """
[data]
name = "iris"
[stop]
updates = 20
[network]
address = "127.0.0.1:{port}"
certificates = "certs"
join_timeout = 100.0
[prediction]
deadline = 20.0
"""


class Serving(Machine):
    """A trained model, and the processes that serve it."""

    def __init__(self, folder):
        super().__init__(folder, CONFIG)
        assert main(["run", str(folder / "run.toml"), "--out", str(folder / "model")]) == 0

    def command(self, *options):
        return ["serve", str(self.folder / "run.toml"), "--model", str(self.folder / "model"), *options]

    def start(self, name, *options):
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "vafl.cli", *self.command(*options)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def port(self, name):
        """Return the HTTP port from the server's log."""
        until(lambda: re.search(r"https?://\S+:\d+", self.log(name)), "an address", lambda: self.alive(name))
        return int(re.search(r"https?://\S+:(\d+)", self.log(name))[1])

    def alive(self, name):
        assert self.processes[name].poll() is None, self.log(name)
        return self.log(name)[-2000:]


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    made = Serving(tmp_path_factory.mktemp("serving"))
    yield made
    made.end()


# --- on loopback, without keys ---


@pytest.fixture(scope="module")
def plain(serving):
    """The port of a server without keys. Its clients never connect, so it refuses every prediction."""
    own = ("network.address=127.0.0.1:0", "network.join_timeout=100000.0")
    serving.start("plain", "--http", "127.0.0.1:0", *(text for each in own for text in ("--set", each)))
    return serving.port("plain")


def ask(port, method="GET", path="/health", body=None, **headers):
    """Send a request and return its status, headers and document. Header names have underscores here."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)) as connection:
        connection.request(
            method, path, body, {name.replace("_", "-"): text for name, text in headers.items()}
        )
        return _read(connection)


def _read(connection):
    answer = connection.getresponse()
    content = answer.read()
    is_json = answer.headers["Content-Type"].startswith("application/json")
    return answer.status, answer.headers, json.loads(content) if is_json else content.decode()


def kind_of(answer):
    return answer[0], answer[2]["error"]["type"]


JSON = {"Content_Type": "application/json"}
TOO_EARLY = (503, "starting")


def test_a_request_is_answered_by_every_name_of_this_machine(plain):
    for host in ("127.0.0.1", f"127.0.0.1:{plain}", "localhost:1", "[::1]:8080", "LOCALHOST"):
        assert ask(plain, Host=host)[2]["status"] == "starting"
    body = json.dumps({"ids": [0]})
    for content_type in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        assert kind_of(ask(plain, "POST", "/predict", body, Content_Type=content_type)) == TOO_EARLY


@pytest.mark.parametrize(
    "host",
    ["else.example", "else.example:80", "localhost.else.example", "", "10.0.0.1", "127.0.0.1:x", "0.0.0.0"],
)
def test_another_host_is_refused(plain, host):
    """DNS rebinding: a page of another site would send the name of that site as Host."""
    answer = ask(plain, Host=host)
    assert kind_of(answer) == (421, "wrong_host")
    assert answer[1]["Connection"] == "close"
    assert kind_of(ask(plain, "POST", "/predict", "{}", Host=host, **JSON)) == (421, "wrong_host")


def test_a_request_without_host_is_refused(plain):
    with socket.create_connection(("127.0.0.1", plain), timeout=LIMIT) as raw:
        raw.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 421 " in b"".join(iter(lambda: raw.recv(65_536), b"")).splitlines()[0]


@pytest.mark.parametrize("origin", ["https://else.example", "null", "http://127.0.0.1:1", "http://localhost"])
def test_another_site_is_refused_and_told_nothing(plain, origin):
    for method, path in (
        ("GET", "/health"),
        ("POST", "/predict"),
        ("OPTIONS", "/predict"),
        ("GET", "/metrics"),
    ):
        asked = {"Origin": origin, "Access_Control_Request_Method": "POST", **JSON}
        answer = ask(plain, method, path, "{}" if method == "POST" else None, **asked)
        assert kind_of(answer) == (403, "cross_origin")
        assert not [name for name in answer[1] if name.lower().startswith("access-control")]


def test_a_page_of_its_own_origin_is_not_another_site(plain):
    assert ask(plain, Origin=f"http://127.0.0.1:{plain}")[0] == 503
    assert kind_of(ask(plain, "OPTIONS", "/predict")) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"]
)
def test_a_body_that_a_form_could_send_is_refused(plain, content_type):
    answer = ask(plain, "POST", "/predict", json.dumps({"ids": [0]}), Content_Type=content_type)
    assert kind_of(answer) == (415, "unsupported_media_type")


HALF_SENT = {  # unfinished requests, and the bytes to send one at a time after each
    b"": b"",
    b"GET /hea": b"",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: ": b"x",
    b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    b"Content-Type: application/json\r\nContent-Length: 999999\r\n\r\n{": b" ",
}


def is_hung_up(raw, drip=b""):
    """Send a byte, and return whether the server has closed the connection."""
    try:
        raw.sendall(drip)
        content = raw.recv(65_536)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    assert not content or b" 408 " in content.splitlines()[0]
    return not content


def test_requests_that_never_end_are_hung_up_on(plain):
    """Even if bytes keep arriving. The server answers other callers at the same time."""
    with ExitStack() as held:
        open_ones = {}
        for sent, drip in HALF_SENT.items():
            raw = held.enter_context(socket.create_connection(("127.0.0.1", plain), timeout=LIMIT))
            raw.sendall(sent)
            raw.settimeout(0.1)
            open_ones[raw] = drip
        assert ask(plain)[0] == 503
        for raw, drip in open_ones.items():
            until(lambda raw=raw, drip=drip: is_hung_up(raw, drip), "the connection closed")


def test_headers_without_end_are_refused(plain):
    for headers in (b"X-Long: " + b"x" * 20_000, b"".join(b"X-%d: y\r\n" % n for n in range(1000))):
        with socket.create_connection(("127.0.0.1", plain), timeout=LIMIT) as raw:
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + headers + b"\r\n\r\n")
            assert b" 400 " in raw.recv(65_536).splitlines()[0]


def test_connections_are_limited_and_those_beyond_wait_their_turn(serving, plain):
    """The server drops idle connections, and opens no more file descriptors than the limit allows."""
    descriptors = f"/proc/{serving.processes['plain'].pid}/fd"
    before = len(os.listdir(descriptors))
    with ExitStack() as held:
        for _ in range(MOST_CONNECTIONS + 100):
            held.enter_context(socket.create_connection(("127.0.0.1", plain), timeout=LIMIT))
        others = 50  # other files and sockets that the process may open
        assert len(os.listdir(descriptors)) <= before + MOST_CONNECTIONS + others
        assert ask(plain)[0] == 503, "answered once idle connections were dropped"


def test_nobody_binds_beyond_this_machine_without_keys_and_tls(serving, capsys):
    keys = serving.folder / "some.toml"
    assert main(["keys", "add", str(keys), "someone"]) == 0
    capsys.readouterr()
    for options in ([], ["--keys", str(keys)], ["--tls"]):
        for address in ("0.0.0.0:0", "[::]:0", "192.0.2.1:8080", "server.example:8080"):
            assert main(serving.command("--http", address, *options)) == 2
            said = " ".join(capsys.readouterr().err.split())
            assert address in said
            assert ("vafl keys add" in said) == ("--keys" not in options)
            assert ("--tls" in said) == ("--tls" not in options)
            assert "127.0.0.1" in said


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_address_that_is_taken_is_named_as_callers_would_type_it(scheme):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls = Https(context, frozenset()) if scheme == "https" else None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        access = Access(HttpAddress("127.0.0.1", port), tls=tls)

        async def start():
            await HttpServer(web.Application(), access).start()

        with pytest.raises(ConfigError, match=rf" {scheme}://127\.0\.0\.1:{port}: "):
            asyncio.run(start())


# --- beyond loopback, with keys, over TLS ---


@pytest.fixture(scope="module")
def guarded(serving):
    """A server with keys and TLS, and both clients: (port, key, log)."""
    keys = serving.folder / "keys.toml"
    made = subprocess.run(
        [sys.executable, "-m", "vafl.cli", "keys", "add", str(keys), "reports"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    key = re.search(r"vafl_[\w-]{43}", made.stdout)[0]
    serving.start("guarded", "--http", "0.0.0.0:0", "--keys", str(keys), "--tls")
    port = serving.port("guarded")
    for party in PARTIES:
        serving.start(party, "--party", party)
    return port, key, keys


def secure(serving, port, authority=None, name=SERVER_NAME):
    """A connection that requires the party's certificate."""
    context = ssl.create_default_context(cafile=authority or serving.folder / "certs" / "ca.pem")
    raw = socket.create_connection(("127.0.0.1", port), timeout=LIMIT)
    connection = http.client.HTTPSConnection(name, port, timeout=LIMIT, context=context)
    try:
        connection.sock = context.wrap_socket(raw, server_hostname=name)
    except BaseException:
        raw.close()
        raise
    return closing(connection)


def ask_secure(serving, port, method="GET", path="/health", body=None, **headers):
    with secure(serving, port) as connection:
        connection.request(
            method, path, body, {name.replace("_", "-"): text for name, text in headers.items()}
        )
        return _read(connection)


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_callers_with_a_key_are_answered_over_tls_and_counted_by_name(serving, guarded, capsys):
    port, key, keys = guarded
    until(
        lambda: ask_secure(serving, port, **bearer(key))[2]["status"] == "ok",
        "both clients",
        lambda: serving.alive("guarded"),
    )
    for _ in range(2):
        body = json.dumps({"ids": [0, "1"]})
        status, headers, answer = ask_secure(serving, port, "POST", "/predict", body, **JSON, **bearer(key))
        assert (status, answer["complete"]) == (200, True)
        assert headers["Cache-Control"] == "no-store"
    assert kind_of(ask_secure(serving, port, "POST", "/predict", "{", **JSON, **bearer(key))) == (
        400,
        "bad_json",
    )

    wrong = [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {key[:-1]}",
        f"Basic {key}",
        key,
        f"Bearer {key} x",
        "Bearer \xff",
    ]
    for text in wrong:
        for path in ("/health", "/metrics", "/elsewhere"):
            answer = ask_secure(serving, port, path=path, Authorization=text)
            assert kind_of(answer) == (401, "unauthorized")
            assert answer[1]["WWW-Authenticate"] == "Bearer"
            assert answer[1]["Connection"] == "close"
    assert kind_of(ask_secure(serving, port)) == (401, "unauthorized")
    assert ask_secure(serving, port, Authorization=f"bearer {key}")[0] == 200, "schemes have no case"

    metrics = parse(ask_secure(serving, port, path="/metrics", **bearer(key))[2])
    requests = {tuple(labels.values()): value for labels, value in metrics["vafl_serve_requests_total"]}
    assert requests["/predict", "ok", "reports"] == 2
    assert requests["/predict", "bad_json", "reports"] == 1
    assert requests["/health", "unauthorized", ""] == len(wrong) + 1
    assert requests["other", "unauthorized", ""] == len(wrong)
    assert metrics["vafl_serve_records"] == [({}, 150)]
    states = {(labels["client"], labels["state"]): value for labels, value in metrics["vafl_serve_client"]}
    assert states["client-1", "here"] == 1
    assert states["client-2", "gone"] == 0
    buckets = [value for _, value in metrics["vafl_serve_seconds_bucket"]]
    assert buckets == sorted(buckets)
    assert buckets[-1] == metrics["vafl_serve_seconds_count"][0][1] == 2
    cells = {labels["source"]: value for labels, value in metrics["vafl_serve_cells_total"]}
    assert cells == {"cache": 4, "client": 4}
    assert key not in serving.log("guarded")
    assert key not in keys.read_text()

    assert main(["keys", "add", str(keys), "second"]) == 0
    second = re.search(r"vafl_[\w-]{43}", capsys.readouterr().out)[0]
    until(lambda: ask_secure(serving, port, **bearer(second))[0] == 200, "the new key taken")
    assert main(["keys", "remove", str(keys), "second"]) == 0
    until(lambda: ask_secure(serving, port, **bearer(second))[0] == 401, "the key revoked")
    assert ask_secure(serving, port, **bearer(key))[0] == 200


def test_tls_is_by_the_partys_certificate_and_nothing_else_is_spoken(serving, guarded, tmp_path):
    port, key, _ = guarded
    make_authority(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        secure(serving, port, tmp_path / "other" / "ca.pem")
    with pytest.raises(ssl.SSLCertVerificationError):
        secure(serving, port, name="else.example")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(port, **bearer(key))
    for host in (f"{SERVER_NAME}:{port}", "127.0.0.1", "192.0.2.7:8443"):
        assert ask_secure(serving, port, Host=host, **bearer(key))[0] in (200, 503)
    assert kind_of(ask_secure(serving, port, Host="else.example", **bearer(key))) == (421, "wrong_host")


def test_handshakes_that_never_end_are_hung_up_on(guarded):
    port, _, _ = guarded
    with ExitStack() as held:
        open_ones = []
        for sent in (b"", b"\x16\x03\x01"):
            raw = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT))
            raw.sendall(sent)
            raw.settimeout(0.1)
            open_ones.append(raw)
        for raw in open_ones:
            until(lambda raw=raw: is_hung_up(raw), "the connection closed")
