"""A trained model served live: HTTP requests for ids, answered by asking the clients."""

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vafl.build import limited_threads
from vafl.config import Config
from vafl.errors import ConfigError
from vafl.federation.prediction import Deployed
from vafl.federation.refusal import Refusal
from vafl.federation.terms import rows_at_once
from vafl.models.losses import probabilities
from vafl.protocol.rows import Rows
from vafl.protocol.scoring import ANSWERED, STATES
from vafl.runtime.grpc.prediction import Answer, Live
from vafl.runtime.grpc.wire import run
from vafl.runtime.identity import SERVER, HttpAddress

log = logging.getLogger("vafl.server")


def serve(config: Config, run_folder: Path, http: str, listening: Callable[[str, str], None]) -> None:
    """Answers until it is told to stop.

    Args:
        http: host:port for HTTP.
        listening: told the address for clients, and that for HTTP.
    """
    address = HttpAddress.of(http, "ask for predictions")
    _require_aiohttp()
    service = Service(Deployed.load(config, SERVER, run_folder))
    with limited_threads(config.threads):
        run(service.run(address, listening))


def _require_aiohttp() -> None:
    try:
        import aiohttp  # noqa: F401, PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            f"serving needs the package of an extra. {error}. Install it: pip install 'vafl[serve]'."
        ) from error


class Service:
    """Turns ids into rows, and what the clients answer into JSON."""

    def __init__(self, deployed: Deployed) -> None:
        self._deployed, settings = deployed, deployed.config.prediction
        fitting = rows_at_once(deployed.config, deployed.terms().width)
        if settings.largest_request > fitting:
            raise ConfigError(
                "clients must be able to answer prediction.largest_request ids in one message: "
                f"{fitting:,} fit into network.largest_message. Found {settings.largest_request:,}. Lower "
                "it, or raise the other at every party."
            )
        self._live = Live(settings, self._told, fitting)
        self._federation = deployed.serve(deployed.scorer(cached=settings.cache), self._live)
        self._rows = {each: row for row, each in enumerate(deployed.subjects.ids.to_list())}

    async def run(self, http: HttpAddress, listening: Callable[[str, str], None]) -> None:
        """Serves clients and HTTP in one event loop, until a signal."""
        from vafl.federation.http import make_app, start  # noqa: PLC0415 - an extra

        federation, loop = self._federation, asyncio.get_running_loop()
        app = make_app(self.predict, self.health, self._deployed.config.prediction.largest_request)
        try:
            runner, bound = await start(app, http.host, http.port)
        except OSError as error:
            raise ConfigError(
                f"--http: nobody can listen on {http.url(http.port)}: {error.strerror}."
            ) from error
        told = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, told.set)

        async def stop() -> None:
            """Callers first: what they have asked is still answered."""
            await told.wait()
            await runner.cleanup()
            federation.finish("the server was told to stop")

        stopping = asyncio.create_task(stop())
        try:
            await federation.serve(lambda address: listening(address, http.url(bound)))
        finally:
            stopping.cancel()
            await runner.cleanup()

    def health(self) -> dict[str, Any]:
        """Whether the model can be asked, and who would answer."""
        federation, scorer = self._federation, self._federation.server
        here = {
            party: "gone" if m in scorer.absent else "slow" if m in scorer.overdue else "here"
            for m, party in enumerate(self._deployed.parties)
        }
        starting, complete = federation.began is None, set(here.values()) == {"here"}
        status = "starting" if starting else "ok" if complete else "degraded"
        return {"status": status, "parties": here, "records": self._deployed.subjects.rows}

    async def predict(self, ids: list[str]) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            Refusal: some ids are unknown, or the clients are still being waited for.
        """
        if self._federation.began is None:
            raise Refusal(503, "starting", "the clients are being waited for")
        rows = self._find(ids)
        answer = await self._live.ask(self._federation, rows)
        complete = all(state == ANSWERED for own in answer.states for state in own)
        return {"predictions": self._lines(ids, answer), "complete": complete}

    def _find(self, ids: list[str]) -> Rows:
        found = [self._rows.get(each, -1) for each in ids]
        if -1 in found:
            unknown = [each for each, row in zip(ids, found, strict=True) if row < 0]
            message = f"{len(unknown)} of {len(ids)} ids are not known here"
            raise Refusal(404, "unknown_ids", message, ids=unknown[:20])
        return np.array(found, dtype=np.int64)

    def _told(self, outputs: Tensor) -> Tensor:
        return probabilities(outputs, self._deployed.loss) if self._deployed.classes else outputs

    def _lines(self, ids: Sequence[str], answer: Answer) -> list[dict[str, Any]]:
        classes, parties = self._deployed.classes, self._deployed.parties
        lines = []
        for each, values, states in zip(ids, answer.values, answer.states, strict=True):
            said: dict[str, Any] = {"value": values[0]}
            if classes:
                said = {"probabilities": dict(zip(classes, values, strict=True))}
            missing = {parties[m]: STATES[state] for m, state in enumerate(states) if state != ANSWERED}
            lines.append({"id": each, **said, "missing": missing})
        return lines
