"""Serve a trained model over HTTP: callers send ids, and the clients send embeddings for them."""

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vafl.arrays import RowIds
from vafl.config import Config
from vafl.errors import ConfigError
from vafl.observe.prometheus import Sample
from vafl.protocol.inquiry import ANSWERED, STATES
from vafl.run.agreement import rows_at_once
from vafl.run.api_access import Access
from vafl.run.assembly import limited_threads
from vafl.run.local import serve_with
from vafl.run.predict import Deployed, local_answers
from vafl.run.prediction_driver import Answer, Live
from vafl.run.refusal import Refusal
from vafl.transport.grpc.wire import run
from vafl.transport.identity import SERVER

_CLIENT_STATES = ("here", "slow", "gone")


def serve(
    config: Config,
    run_folder: Path,
    access: Access,
    listening: Callable[[str, str], None],
    *,
    accept_ledger: bool = False,
) -> None:
    """Answer HTTP requests until SIGINT or SIGTERM.

    Args:
        access: The HTTP address, and the callers that are accepted.
        listening: Called with the address for clients and the URL for callers.
        accept_ledger: Continue if the ledger of the label holder's own client lacks its last mark.
    """
    _require_aiohttp()
    service = Service(Deployed.load(config, SERVER, run_folder), accept_ledger=accept_ledger)
    with limited_threads(config.threads):
        run(service.run(access, listening))


def _require_aiohttp() -> None:
    try:
        import aiohttp  # noqa: F401, PLC0415 - an optional dependency
    except ImportError as error:
        raise ConfigError(
            "VFL-7201",
            f"`vafl serve` needs an optional package. {error}. Install it: pip install 'vafl[serve]'.",
        ) from error


class Service:
    """Converts ids into rows, and the clients' answers into JSON."""

    def __init__(self, deployed: Deployed, *, accept_ledger: bool = False) -> None:
        self._deployed, settings = deployed, deployed.config.prediction
        fitting = rows_at_once(deployed.config, max(deployed.model.manifest.widths))
        if settings.largest_request > fitting:
            raise ConfigError(
                "VFL-7202",
                "the answer to prediction.largest_request ids must fit into one message: "
                f"network.largest_message allows {fitting:,} ids. Found {settings.largest_request:,}. Lower "
                "prediction.largest_request, or raise network.largest_message at every party.",
            )
        self._live = Live(settings, self._response_values, fitting)
        self._scorer = deployed.scorer(cached=settings.cache)
        self._federation = deployed.serve(self._scorer, self._live)
        self._local = local_answers(deployed, self._federation, accept_ledger=accept_ledger)
        self._rows = {each: row for row, each in enumerate(deployed.records.ids.to_list())}

    async def run(self, access: Access, listening: Callable[[str, str], None]) -> None:
        """Serve clients and HTTP in one event loop until SIGINT or SIGTERM."""
        from vafl.run.http import HttpServer, make_app  # noqa: PLC0415 - needs an optional dependency

        federation, loop = self._federation, asyncio.get_running_loop()
        largest = self._deployed.config.prediction.largest_request
        http = HttpServer(make_app(self.predict, self.health, self.samples, largest, access), access)
        url = await http.start()
        signalled = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, signalled.set)

        async def stop() -> None:
            # Close HTTP before the federation, so that callers still get the answers to pending requests.
            await signalled.wait()
            await http.close()
            federation.finish("the server was told to stop")

        stopping = asyncio.create_task(stop())
        try:
            await serve_with(federation, self._local, lambda address: listening(address, url))
        finally:
            stopping.cancel()
            await http.close()

    def health(self) -> dict[str, Any]:
        """Return whether the service is ready, and the state of every client."""
        states = self._states()
        starting, complete = self._federation.began is None, set(states.values()) == {"here"}
        status = "starting" if starting else "ok" if complete else "degraded"
        return {"status": status, "parties": states, "records": self._deployed.records.rows}

    def _states(self) -> dict[str, str]:
        """Return the state of each client, one of `_CLIENT_STATES`."""
        scorer = self._scorer
        return {
            party: "gone" if m in scorer.absent else "slow" if m in scorer.overdue else "here"
            for m, party in enumerate(self._deployed.parties)
        }

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of the model and its clients."""
        for party, state in self._states().items():
            for each in _CLIENT_STATES:
                yield "vafl_serve_client", {"client": party, "state": each}, int(each == state)
        yield "vafl_serve_records", {}, self._deployed.records.rows
        yield "vafl_serve_cells_total", {"source": "cache"}, self._scorer.recalled
        yield "vafl_serve_cells_total", {"source": "client"}, self._scorer.needed - self._scorer.recalled

    async def predict(self, ids: list[str]) -> dict[str, Any]:
        """Return the answer to one request.

        Raises:
            Refusal: some ids are unknown, or the server still waits for its clients.
        """
        if self._federation.began is None:
            raise Refusal(503, "starting", "the server is waiting for its clients; try again later")
        rows = self._find(ids)
        answer = await self._live.ask(self._federation, rows)
        complete = all(state == ANSWERED for row in answer.states for state in row)
        return {"predictions": self._lines(ids, answer), "complete": complete}

    def _find(self, ids: list[str]) -> RowIds:
        rows = [self._rows.get(each, -1) for each in ids]
        if -1 in rows:
            unknown = [each for each, row in zip(ids, rows, strict=True) if row < 0]
            message = f"{len(unknown)} of {len(ids)} ids are unknown to this server"
            raise Refusal(404, "unknown_ids", message, ids=unknown[:20])
        return np.array(rows, dtype=np.int64)

    def _response_values(self, outputs: Tensor) -> Tensor:
        """Return the values that callers receive for each row: a probability per class, or the number."""
        if not self._deployed.classes:
            return outputs
        return torch.from_numpy(self._deployed.decision.probabilities(outputs))

    def _lines(self, ids: Sequence[str], answer: Answer) -> list[dict[str, Any]]:
        classes, parties = self._deployed.classes, self._deployed.parties
        chosen = self._deployed.decision.choose(np.array(answer.values)).tolist() if classes else []
        lines = []
        for place, (each, values, states) in enumerate(zip(ids, answer.values, answer.states, strict=True)):
            prediction: dict[str, Any] = {"value": values[0]}
            if classes:
                prediction = {
                    "prediction": classes[chosen[place]],
                    "probabilities": dict(zip(classes, values, strict=True)),
                }
            missing = {parties[m]: STATES[state] for m, state in enumerate(states) if state != ANSWERED}
            lines.append({"id": each, **prediction, "missing": missing})
        return lines
