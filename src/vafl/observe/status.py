"""The status of a run: DIR/status.json, replaced atomically every half second.

Programs that watch a run read this file. The run itself accepts no connections for that. After the run has
ended, the file holds its last status.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vafl.files import write_atomically

STATUS = "status.json"
_BEYOND = 2.0**63  # larger than any number that a run can reach

Baselines = Mapping[str, Mapping[str, Mapping[str, float | None]]]
"""The name of a baseline -> rows, "validation" or "test" -> metric -> value."""


@dataclass(frozen=True)
class ClientStatus:
    """The current state of one client.

    Attributes:
        activations: uploads that the client has made.
        bytes_up, bytes_down: bytes that the client has sent and received.
        gone: whether the client is disconnected.
        delay_mean, delay_max: staleness of the client's embeddings when used, in server steps, at the last
            evaluation.
        alarms: current anomalies of the client; see `vafl.transport.vitals`.
        silent: seconds since the client's last message, if it is connected and it is its turn; 0 until
            network.heartbeat has passed.
    """

    name: str
    activations: int
    bytes_up: int
    bytes_down: int
    gone: bool = False
    delay_mean: float = 0.0
    delay_max: int = 0
    alarms: Sequence[str] = ()
    silent: float = 0.0


@dataclass(frozen=True)
class Status:
    """The current state of a run.

    Attributes:
        metric: the name of the headline metric.
        rows: the rows that evaluations use, "validation" or "test".
        share: completed share of the run, 0 to 1.
        seconds: time on the run's clock, which is simulated in a simulation.
        rate: updates per second of wall-clock time.
        waiting: what the run waits for; empty while it makes progress.
        baselines: the metrics of the baselines.
        at: when this was recorded, in seconds since 1970.
    """

    title: str
    metric: str
    rows: str
    share: float
    seconds: float
    updates: int
    rate: float
    waiting: str
    clients: Sequence[ClientStatus]
    baselines: Baselines = field(default_factory=dict)
    at: float = field(default_factory=time.time)

    @classmethod
    def of(cls, document: dict[str, Any]) -> "Status":
        """Return the status from the JSON document that `write` wrote.

        Raises:
            TypeError: the document is not a status.
        """
        clients = tuple(map(_client, document.pop("clients", ())))
        baselines = checked_baselines(document.pop("baselines", {}))
        status = cls(**document, clients=clients, baselines=baselines)
        _check(status)
        for client in clients:
            _check(client)
        return status

    def write(self, folder: Path) -> None:
        """Write status.json atomically. It need not survive a power failure, so it is not synced to disk."""
        content = json.dumps(asdict(self)).encode()
        write_atomically(folder / STATUS, content, durable=False)


def checked_baselines(document: Any) -> Baselines:
    """Return `document` if it has the form of `Baselines`.

    Raises:
        TypeError: it does not.
    """
    if not isinstance(document, dict):
        raise TypeError(f"baselines {document!r}")
    return {
        name: {rows: checked_figures(by_rows[rows]) for rows in by_rows} for name, by_rows in document.items()
    }


def checked_figures(document: Any) -> dict[str, float | None]:
    """Return `document` if it is a dictionary of finite numbers and None.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(document, dict) or not all(
        value is None or _is_number(value) for value in document.values()
    ):
        raise TypeError(f"metrics {document!r}")
    return document


def _client(document: dict[str, Any]) -> ClientStatus:
    client = ClientStatus(**document)
    return replace(client, alarms=tuple(client.alarms)) if isinstance(client.alarms, list) else client


def _check(status: Status | ClientStatus) -> None:
    """Raise TypeError unless texts are strings and numbers are finite."""
    for entry in fields(status):
        value = getattr(status, entry.name)
        if entry.name == "alarms":
            fits = isinstance(value, tuple) and all(isinstance(alarm, str) for alarm in value)
        else:
            checked = entry.name in ("clients", "baselines")
            fits = checked or (isinstance(value, str) if entry.type is str else _is_number(value))
        if not fits:
            raise TypeError(f"{entry.name} {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < _BEYOND
