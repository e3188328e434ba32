"""The HTTP face of a served model: JSON in, JSON out, and every refusal is JSON too."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from vafl.federation.refusal import Refusal

log = logging.getLogger("vafl.http")

_BODY_PATIENCE = 10.0  # seconds for a request's body to arrive
_ID_BYTES = 256  # of a body, for each id that a request may hold
_TYPES = {404: "not_found", 405: "method_not_allowed", 408: "too_slow", 413: "too_large"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    predict: Callable[[list[str]], Awaitable[dict[str, Any]]],
    health: Callable[[], dict[str, Any]],
    largest: int,
) -> web.Application:
    """POST /predict {"ids": [...]} and GET /health.

    Args:
        predict: answers for distinct or repeated ids, in their order; may raise Refusal.
        health: whether the model can be asked, and who is here.
        largest: ids in one request.
    """

    async def post(request: web.Request) -> web.Response:
        return web.json_response(await predict(_ids(await _body(request), largest)))

    async def get(request: web.Request) -> web.Response:
        facts = health()
        return web.json_response(facts, status=503 if facts["status"] == "starting" else 200)

    app = web.Application(middlewares=[_refusals], client_max_size=1024 + largest * _ID_BYTES)
    app.add_routes([web.post("/predict", post), web.get("/health", get)])
    return app


async def start(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Listens in the running loop; gives what to clean up in the end, and the port."""
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=_BODY_PATIENCE)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    return runner, int(runner.addresses[0][1])


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong, the caller gets JSON, and never a trace of what is inside."""
    try:
        return await handler(request)
    except Refusal as refusal:
        status, body = refusal.status, refusal.body
    except web.HTTPException as error:
        kind = _TYPES.get(error.status, "bad_request")
        status, body = error.status, {"type": kind, "message": error.reason}
    except asyncio.CancelledError:
        raise
    except Exception:
        log.exception("a request failed")
        status, body = 500, {"type": "internal", "message": "the server failed; its log says why"}
    return web.json_response({"error": body}, status=status)


async def _body(request: web.Request) -> Any:
    try:
        content = await asyncio.wait_for(request.read(), _BODY_PATIENCE)
    except TimeoutError:
        raise Refusal(408, "too_slow", f"a body must arrive within {_BODY_PATIENCE:g} s") from None
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
