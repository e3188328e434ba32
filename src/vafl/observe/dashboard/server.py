"""The dashboard's HTTP server: a page, its parts, the runs as JSON and as metrics. It only reads."""

import json
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from pathlib import Path
from socketserver import ThreadingTCPServer
from threading import BoundedSemaphore, Timer
from typing import Any

from vafl.observe.dashboard.exporter import as_prometheus
from vafl.observe.dashboard.views import look
from vafl.observe.prometheus import CONTENT_TYPE
from vafl.transport.identity import HttpAddress

log = logging.getLogger("vafl.watch")

MOST_CONNECTIONS = 64
_HEADERS_PATIENCE = 10.0  # seconds for all headers of a request to arrive, and for its answer to leave

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
    """Shows the runs of some folders, to at most `MOST_CONNECTIONS` connections at a time.

    Attributes:
        answers: Path -> content type and the function that makes the content.
        address: Where it was told to listen.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, folders: Sequence[Path], address: HttpAddress) -> None:
        own = files(__package__)
        self.answers: Answers = {
            "/runs.json": ("application/json", partial(_runs, folders)),
            "/metrics": (CONTENT_TYPE, lambda: as_prometheus(look(folders)[0])),
            **{path: (kind, (own / name).read_text) for path, (name, kind) in _PARTS.items()},
        }
        self.address = address
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._slots = BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((address.host, address.port), _Request)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def verify_request(self, request: object, client_address: object) -> bool:
        """Return whether there is room for one more connection; if not, it is closed at once."""
        return self._slots.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()


def _runs(folders: Sequence[Path]) -> str:
    views, others = look(folders)
    return json.dumps({"runs": [view.as_json() for view in views], "others": others}, allow_nan=False)


class _Request(BaseHTTPRequestHandler):
    server: Dashboard
    timeout = _HEADERS_PATIENCE

    def setup(self) -> None:
        super().setup()
        # `timeout` bounds each read only, so a caller that sends single bytes could hold on to a thread.
        self._deadline = Timer(_HEADERS_PATIENCE, self._hang_up)
        self._deadline.daemon = True
        self._deadline.start()

    def finish(self) -> None:
        self._deadline.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def do_GET(self) -> None:
        self._deadline.cancel()
        if not self.server.address.answers_to(self.headers.get("Host", "")):
            # A page of another site whose name was made to point here (DNS rebinding) could read the answer.
            return self.send_error(
                HTTPStatus.FORBIDDEN, "unknown host: use the address that vafl watch was started with"
            )
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
        """Log no requests."""
