"""The dashboard's read-only HTTP server: the page and its files, and the runs as JSON and as metrics."""

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
_HEADERS_PATIENCE = 10.0  # seconds to receive all headers of a request, and to send its response

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
    """Serves the runs in some folders, to at most `MOST_CONNECTIONS` connections at a time.

    Attributes:
        answers: URL path -> content type, and the function that returns the content.
        address: The configured address. `port` is the actual port, if the configured one is 0.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, folders: Sequence[Path], address: HttpAddress) -> None:
        package = files(__package__)
        self.answers: Answers = {
            "/runs.json": ("application/json", partial(_runs, folders)),
            "/metrics": (CONTENT_TYPE, lambda: as_prometheus(look(folders)[0])),
            **{path: (kind, (package / name).read_text) for path, (name, kind) in _PARTS.items()},
        }
        self.address = address
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._slots = BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((address.host, address.port), _Request)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def verify_request(self, request: object, client_address: object) -> bool:
        """Return whether the limit allows one more connection. If not, the connection is closed."""
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
        # `timeout` applies to each read, so a caller that sends single bytes could occupy a thread for hours.
        # This timer limits the time for all headers together.
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
            # DNS rebinding: another site's name may resolve to this address. Its pages could then read the
            # response.
            return self.send_error(
                HTTPStatus.FORBIDDEN, "unknown host: use the address that vafl watch was started with"
            )
        entry = self.server.answers.get(self.path.partition("?")[0])
        if entry is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        kind, answer = entry
        try:
            content = answer().encode(errors="replace")  # a folder's name may not be valid Unicode
        except Exception:
            log.exception("a request for %s failed", self.path)
            return self.send_error(
                HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see the dashboard's log"
            )
        self.send_response(HTTPStatus.OK)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
        return None

    def log_message(self, *words: object) -> None:
        """Do nothing: requests are not logged."""
