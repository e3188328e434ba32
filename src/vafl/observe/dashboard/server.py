"""The dashboard's HTTP: a page, its parts, the runs as JSON, and as metrics. It only ever reads."""

import json
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from pathlib import Path
from socketserver import ThreadingTCPServer

from vafl.observe.dashboard.exporter import CONTENT_TYPE, as_prometheus
from vafl.observe.dashboard.views import look
from vafl.runtime.identity import is_loopback

log = logging.getLogger("vafl.watch")

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_PARTS = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
Answers = Mapping[str, tuple[str, Callable[[], str]]]


class Dashboard(ThreadingTCPServer):
    """Shows the runs of some folders while it serves.

    Attributes:
        answers: by path, their type and what gives them.
        only_here: whether no other machine can reach it.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, folders: Sequence[Path], host: str, port: int) -> None:
        own = files(__package__)
        self.answers: Answers = {
            "/runs.json": ("application/json", partial(_runs, folders)),
            "/metrics": (CONTENT_TYPE, lambda: as_prometheus(look(folders)[0])),
            **{path: (kind, (own / name).read_text) for path, (name, kind) in _PARTS.items()},
        }
        self.only_here = is_loopback(host)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Request)

    @property
    def port(self) -> int:
        return int(self.server_address[1])


def _runs(folders: Sequence[Path]) -> str:
    views, others = look(folders)
    return json.dumps({"runs": [view.as_json() for view in views], "others": others}, allow_nan=False)


class _Request(BaseHTTPRequestHandler):
    server: Dashboard
    timeout = 10.0  # seconds for a caller to say what it wants

    def do_GET(self) -> None:
        if self.server.only_here and not is_loopback(self.headers.get("Host", "")):
            # A page from elsewhere whose name was made to point here would read along.
            return self.send_error(HTTPStatus.FORBIDDEN, "this is for this machine only, by its own name")
        found = self.server.answers.get(self.path.partition("?")[0])
        if found is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        kind, answer = found
        try:
            content = answer().encode(errors="replace")  # a folder's name may be no text
        except Exception:
            log.exception("%s could not be answered", self.path)
            return self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "the dashboard failed; its log says why")
        self.send_response(HTTPStatus.OK)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
        return None

    def log_message(self, *words: object) -> None:
        """Who looks at a page is nothing to write down."""
