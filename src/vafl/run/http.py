"""The HTTP side of a served model: JSON in, JSON out, and every refusal is JSON too.

A request passes these checks in turn before anything else is done with it:

1. Host names this server (421), so that a page of another site cannot read answers by DNS rebinding.
2. Origin, if a browser sent one, is this server's (403). No answer carries CORS headers.
3. Authorization holds a known key (401), if the server has keys.
4. A POST has the type application/json (415), which no HTML form can send.

A caller that fails one of the first three checks is disconnected. Connections are limited in number, and
every part of a request has a deadline: see `HttpServer`.
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
_BODY_PATIENCE = 10.0  # seconds for a request's body to arrive
_IDLE_PATIENCE = 15.0  # seconds from an answer to the next request's last header, and to send an answer
_HANDSHAKE_PATIENCE = 10.0
_LINGER = 2.0  # seconds to read on after a refusal, so that the caller gets it before a reset
_RETRY = 1.0  # seconds until another try to accept, when the process has no file descriptor left
_BACKLOG = 128  # connections that the kernel keeps waiting
_ID_BYTES = 256  # of a body, for each id that a request may hold
_LIMITS = {"max_line_size": 4096, "max_field_size": 4096, "max_headers": 64}
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Server": "vafl"}
_TYPES = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}
_PATHS = ("/predict", "/health", "/metrics")
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_FAMILIES = {
    "vafl_serve_requests_total": ("counter", "Requests by path, outcome and the name of the caller's key"),
    "vafl_serve_seconds": (
        "histogram",
        "Seconds from a question's headers to its answer, if it was answered",
    ),
    "vafl_serve_client": ("gauge", "1 for the state that the client is in, 0 for the others"),
    "vafl_serve_records": ("gauge", "Records that can be asked for"),
    "vafl_serve_cells_total": ("counter", "Embeddings that questions needed, by where they came from"),
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    predict: Callable[[list[str]], Awaitable[dict[str, Any]]],
    health: Callable[[], dict[str, Any]],
    samples: Callable[[], Iterable[Sample]],
    largest: int,
    access: Access,
) -> web.Application:
    """Make the application: POST /predict {"ids": [...]}, GET /health and GET /metrics.

    Args:
        predict: Answers for distinct or repeated ids, in their order; may raise Refusal.
        health: Whether the model can be asked, and which clients are here.
        samples: The metrics of the service behind this; requests are counted here.
        largest: Ids in one request.
        access: Who may ask.
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
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
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
            log.exception("a request failed; path %s, key %s", path, caller or "none")
            return _refused(Refusal(500, outcome, "the server failed; its log says why"))
        finally:
            requests[path, outcome, caller] += 1

    app = web.Application(middlewares=[guard], client_max_size=1024 + largest * _ID_BYTES)
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
        message = f"a body must arrive within {_BODY_PATIENCE:g} s"
        raise Refusal(408, "too_slow", message, hangs_up=True) from None
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "bad_json", f"the body must be JSON: {error}") from None


def _ids(document: Any, largest: int) -> list[str]:
    ids = document.get("ids") if isinstance(document, dict) else None
    if not isinstance(ids, list) or not ids or not all(type(each) in (str, int) for each in ids):
        raise Refusal(400, "bad_request", 'the body must be {"ids": [...]}, one id or more, text or numbers')
    if len(ids) > largest:
        message = f"at most {largest} ids in a request (prediction.largest_request). Found {len(ids)}"
        raise Refusal(413, "too_many_ids", message)
    return [str(each) for each in ids]


class HttpServer:
    """Serves an application in the running event loop, to at most `MOST_CONNECTIONS` connections at a time.

    Connections are accepted here, not by asyncio's server, because that accepts without limit: strangers who
    open connections would use up the file descriptors that the federation's clients need too. At the limit,
    further connections wait in the kernel's queue until others are closed. They are closed soon:

    - a TLS handshake has 10 s;
    - the headers of a request have 15 s, from the connection's start or the last answer, however slowly bytes
      arrive (aiohttp's keep-alive time-out is such a deadline);
    - a body has 10 s;
    - a peer that takes no bytes of its answer is dropped by the kernel after 15 s (TCP_USER_TIMEOUT).
    """

    def __init__(self, app: web.Application, access: Access) -> None:
        self._access = access
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=_BODY_PATIENCE)
        self._slots = asyncio.Semaphore(MOST_CONNECTIONS)
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen; return the URL for callers.

        Raises:
            ConfigError: The address cannot be bound.
        """
        address, port = self._access.address, self._access.address.port
        loop = asyncio.get_running_loop()
        await self._runner.setup()
        try:
            found = await loop.getaddrinfo(address.host, port, type=socket.SOCK_STREAM)
            for family, kind, _, _, place in dict.fromkeys(found):
                listener = socket.socket(family, kind)
                self._listeners.append(listener)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((place[0], port, *place[2:]))
                port = port or listener.getsockname()[1]  # the other families take the same
                listener.listen(_BACKLOG)
                listener.setblocking(False)
        except OSError as error:
            await self.close()
            url = address.url(port, self._access.scheme)
            raise ConfigError(
                "VFL-7081",
                f"--http: cannot listen on {url}: {error.strerror}. Choose an address of this machine and a "
                "free port.",
            ) from error
        for listener in self._listeners:
            self._start(self._accept(listener))
        return address.url(port, self._access.scheme)

    async def close(self) -> None:
        """Accept no more, and answer what was asked."""
        for task in [*self._tasks]:
            task.cancel()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        await self._runner.cleanup()

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:  # the caller was faster to hang up
                self._slots.release()
                continue
            except OSError as error:
                self._slots.release()
                log.warning("cannot accept a connection: %s; trying again in %g s", error.strerror, _RETRY)
                await asyncio.sleep(_RETRY)
                continue
            self._start(self._open(connection))

    async def _open(self, connection: socket.socket) -> None:
        """Hand an accepted connection to aiohttp, after the TLS handshake if there is one."""
        slot, tls = _Slot(self._slots), self._access.tls
        with suppress(OSError, AttributeError):  # Linux has the option
            limit = int(_IDLE_PATIENCE * 1000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Connection(self._runner, slot),
                connection,
                ssl=tls.context if tls else None,
                ssl_handshake_timeout=_HANDSHAKE_PATIENCE if tls else None,
            )
        except (OSError, TimeoutError):  # it is gone, or speaks no TLS
            slot.free()
        except BaseException:
            slot.free()
            raise


class _Slot:
    """One of a limited number of connections; `free` may be called more than once."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots: asyncio.Semaphore | None = slots

    def free(self) -> None:
        if self._slots is not None:
            self._slots.release()
            self._slots = None


class _Connection(web.RequestHandler):
    """A connection in aiohttp's hands, which frees its slot when it ends."""

    __slots__ = ("_slot",)

    def __init__(self, runner: web.AppRunner, slot: _Slot) -> None:
        if runner.server is None:
            raise ConnectionAbortedError("the server is being closed")
        super().__init__(
            runner.server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=_IDLE_PATIENCE,
            lingering_time=_LINGER,
            auto_decompress=False,  # a few bytes could become very many
            access_log=None,  # type: ignore[arg-type]  # aiohttp's own default type forgets it
            logger=_quiet,
            **_LIMITS,  # type: ignore[arg-type]
        )
        self._slot = slot

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._slot.free()


def _is_ours(record: logging.LogRecord) -> bool:
    """Return False for log records about malformed requests: strangers could fill the log with them."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_quiet = logging.getLogger("vafl.http.aiohttp")
_quiet.addFilter(_is_ours)
