"""The HTTP interface of a served model. Requests, responses and errors are JSON.

The server checks every request in this order before it does anything else:

1. Host names this server (421), so that a page of another site cannot read responses by DNS rebinding.
2. Origin, if a browser sent one, is this server's (403). No response has CORS headers.
3. Authorization holds a known key (401), if the server has keys.
4. A POST has the content type application/json (415), which no HTML form can send.

The server disconnects a caller that fails one of the first three checks. It limits the number of connections,
and every part of a request has a deadline: see `HttpServer`.
"""

import asyncio
import json
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from vafl.errors import ConfigError
from vafl.observe.prometheus import CONTENT_TYPE, Histogram, Sample, exposition
from vafl.run.api_access import Access
from vafl.run.refusal import Refusal

log = logging.getLogger("vafl.http")

MOST_CONNECTIONS = 512
_BODY_PATIENCE = 10.0  # seconds to receive the body of a request
_IDLE_PATIENCE = 15.0  # seconds from a response to the next request's last header, and to send a response
_HANDSHAKE_PATIENCE = 10.0  # seconds for the TLS handshake
_LINGER = 2.0  # seconds to keep reading after a refusal, so that the caller receives it before a reset
_RETRY = 1.0  # seconds until the next accept when the process has no file descriptor left
_BACKLOG = 128  # connections that wait in the kernel's queue
_ID_BYTES = 256  # bytes of the body allowed for each id
_LIMITS = {"max_line_size": 4096, "max_field_size": 4096, "max_headers": 64}
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Server": "vafl"}
_TYPES = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}
_PATHS = ("/predict", "/health", "/metrics")
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_FAMILIES = {
    "vafl_serve_requests_total": ("counter", "Requests by path, outcome and the name of the caller's key"),
    "vafl_serve_seconds": (
        "histogram",
        "Seconds from the headers of an answered request to its response",
    ),
    "vafl_serve_client": ("gauge", "1 for the client's current state, 0 for the other states"),
    "vafl_serve_records": ("gauge", "Records that requests can ask for"),
    "vafl_serve_cells_total": ("counter", "Embeddings that requests needed, by source"),
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    predict: Callable[[list[str]], Awaitable[dict[str, Any]]],
    health: Callable[[], dict[str, Any]],
    samples: Callable[[], Iterable[Sample]],
    largest: int,
    access: Access,
) -> web.Application:
    """Create the application: POST /predict {"ids": [...]}, GET /health and GET /metrics.

    Args:
        predict: Returns the predictions for ids, in their order. Ids may repeat. May raise Refusal.
        health: Returns whether the service is ready, and the state of every client.
        samples: Yields the metrics of the service. The application adds those of the requests.
        largest: The most ids in one request.
        access: The callers that are accepted.
    """
    requests, seconds = Counter[tuple[str, str, str]](), Histogram(_BOUNDS)

    async def post(request: web.Request) -> web.Response:
        _require_json(request)
        began = asyncio.get_running_loop().time()
        answer = await predict(_ids(await _body(request), largest))
        seconds.observe(asyncio.get_running_loop().time() - began)
        return _answer(answer)

    async def get_health(request: web.Request) -> web.Response:
        facts = health()
        return _answer(facts, 503 if facts["status"] == "starting" else 200)

    async def get_metrics(request: web.Request) -> web.Response:
        counted = [
            ("vafl_serve_requests_total", {"path": path, "outcome": outcome, "caller": caller}, count)
            for (path, outcome, caller), count in sorted(requests.items())
        ]
        text = exposition(_FAMILIES, [*counted, *seconds.samples("vafl_serve_seconds"), *samples()])
        return web.Response(body=text.encode(), headers={**_HEADERS, "Content-Type": CONTENT_TYPE})

    @web.middleware
    async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path if request.path in _PATHS else "other"
        caller, outcome = "", "ok"
        try:
            caller = access.admit(request.headers)
            return await handler(request)
        except Refusal as refusal:
            outcome = refusal.kind
            return _refused(refusal)
        except web.HTTPException as error:
            outcome = _TYPES.get(error.status, "bad_request")
            return _refused(Refusal(error.status, outcome, error.reason))
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Exception:
            outcome = "internal"
            log.exception("a request to %s failed (key: %s)", path, caller or "none")
            return _refused(Refusal(500, outcome, "internal server error; see the server's log"))
        finally:
            requests[path, outcome, caller] += 1

    app = web.Application(middlewares=[error_middleware], client_max_size=1024 + largest * _ID_BYTES)
    routes = [web.post("/predict", post), web.get("/health", get_health), web.get("/metrics", get_metrics)]
    app.add_routes(routes)
    return app


def _answer(document: dict[str, Any], status: int = 200) -> web.Response:
    return web.json_response(document, status=status, headers=_HEADERS)


def _refused(refusal: Refusal) -> web.Response:
    response = _answer({"error": refusal.body}, refusal.status)
    response.headers.update(refusal.headers)
    if refusal.hangs_up:
        response.force_close()
    return response


def _require_json(request: web.Request) -> None:
    if request.content_type != "application/json":
        raise Refusal(
            415,
            "unsupported_media_type",
            f"the body must have the header Content-Type: application/json. Found {request.content_type}",
        )


async def _body(request: web.Request) -> Any:
    try:
        async with asyncio.timeout(_BODY_PATIENCE):
            content = await request.read()
    except TimeoutError:
        message = f"the body must arrive within {_BODY_PATIENCE:g} s"
        raise Refusal(408, "too_slow", message, hangs_up=True) from None
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "bad_json", f"the body must be JSON: {error}") from None


def _ids(document: Any, largest: int) -> list[str]:
    ids = document.get("ids") if isinstance(document, dict) else None
    if not isinstance(ids, list) or not ids or not all(type(each) in (str, int) for each in ids):
        raise Refusal(
            400, "bad_request", 'the body must be {"ids": [...]} with at least one id, text or integer'
        )
    if len(ids) > largest:
        message = f"a request may have at most {largest} ids (prediction.largest_request). Found {len(ids)}"
        raise Refusal(413, "too_many_ids", message)
    return [str(each) for each in ids]


class HttpServer:
    """Serves an application in the running event loop, to at most `MOST_CONNECTIONS` connections at a time.

    This class accepts connections itself, because asyncio's server accepts without limit: unauthenticated
    callers could use up the file descriptors that the federation's clients need. At the limit, further
    connections wait in the kernel's queue until others are closed. Deadlines make sure that they are:

    - a TLS handshake must finish within 10 s;
    - all headers of a request must arrive within 15 s of the connection's start or the last response, however
      slowly bytes arrive (aiohttp's keep-alive timeout is such a deadline);
    - a body must arrive within 10 s;
    - the kernel drops a peer that acknowledges no bytes of its response for 15 s (TCP_USER_TIMEOUT).
    """

    def __init__(self, app: web.Application, access: Access) -> None:
        self._access = access
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=_BODY_PATIENCE)
        self._slots = asyncio.Semaphore(MOST_CONNECTIONS)
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Start to listen, and return the URL for callers.

        Raises:
            ConfigError: The address cannot be bound.
        """
        address, port = self._access.address, self._access.address.port
        loop = asyncio.get_running_loop()
        await self._runner.setup()
        try:
            resolved = await loop.getaddrinfo(address.host, port, type=socket.SOCK_STREAM)
            for family, kind, _, _, place in dict.fromkeys(resolved):
                listener = socket.socket(family, kind)
                self._listeners.append(listener)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((place[0], port, *place[2:]))
                # Port 0 lets the system choose. Use the port that it chose for the other families, too.
                port = port or listener.getsockname()[1]
                listener.listen(_BACKLOG)
                listener.setblocking(False)
        except OSError as error:
            await self.close()
            url = address.url(port, self._access.scheme)
            raise ConfigError(
                "VFL-7081",
                f"--http must be an address of this machine with a free port. Cannot listen on {url}: "
                f"{error.strerror}. Choose another address or port.",
            ) from error
        for listener in self._listeners:
            self._start(self._accept(listener))
        return address.url(port, self._access.scheme)

    async def close(self) -> None:
        """Stop accepting connections, and answer pending requests."""
        for task in [*self._tasks]:
            task.cancel()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        await self._runner.cleanup()

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the event loop holds only a weak reference
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:  # the caller disconnected before the accept
                self._slots.release()
                continue
            except OSError as error:
                self._slots.release()
                log.warning("cannot accept a connection: %s; retrying in %g s", error.strerror, _RETRY)
                await asyncio.sleep(_RETRY)
                continue
            self._start(self._open(connection))

    async def _open(self, connection: socket.socket) -> None:
        """Hand an accepted connection to aiohttp, after the TLS handshake if there is one."""
        slot, tls = _Slot(self._slots), self._access.tls
        with suppress(OSError, AttributeError):  # only Linux has this option
            limit = int(_IDLE_PATIENCE * 1000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Connection(self._runner, slot),
                connection,
                ssl=tls.context if tls else None,
                ssl_handshake_timeout=_HANDSHAKE_PATIENCE if tls else None,
            )
        except (OSError, TimeoutError):  # the peer disconnected, or does not speak TLS
            slot.free()
        except BaseException:
            slot.free()
            raise


class _Slot:
    """One of a limited number of connections. Only the first call of `free` has an effect."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots: asyncio.Semaphore | None = slots

    def free(self) -> None:
        if self._slots is not None:
            self._slots.release()
            self._slots = None


class _Connection(web.RequestHandler):
    """An aiohttp connection that frees its slot when it ends."""

    __slots__ = ("_slot",)

    def __init__(self, runner: web.AppRunner, slot: _Slot) -> None:
        if runner.server is None:
            raise ConnectionAbortedError("the server is being closed")
        super().__init__(
            runner.server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=_IDLE_PATIENCE,
            lingering_time=_LINGER,
            auto_decompress=False,  # a small compressed body could expand to fill the memory
            access_log=None,  # type: ignore[arg-type]  # aiohttp accepts None, but its type says otherwise
            logger=_quiet,
            **_LIMITS,  # type: ignore[arg-type]
        )
        self._slot = slot

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._slot.free()


def _is_ours(record: logging.LogRecord) -> bool:
    """Return False for log records about malformed requests, with which any caller could fill the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_quiet = logging.getLogger("vafl.http.aiohttp")
_quiet.addFilter(_is_ours)
