"""What a run says of itself while it goes on: DIR/status.json, half a second old, whole at any moment.

Whoever wants to watch a run reads its folder; the run itself listens to nobody. When it has ended, the file
tells how it stood last.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vafl.files import write_atomically

STATUS = "status.json"
_BEYOND = 2.0**63  # any number that a run can reach

Baselines = Mapping[str, Mapping[str, Mapping[str, float | None]]]
"""The name of a baseline -> rows, "validation" or "test" -> metric -> value."""


@dataclass(frozen=True)
class ClientStatus:
    """One client as it stands.

    Attributes:
        activations: uploads it has made.
        gone: whether it is not here.
        delay_mean, delay_max: of its cells when they were used, as of the last evaluation.
        alarms: what is not normal about it now, as `vafl.transport.vitals` has it.
        silent: seconds without a message from it, though it is connected and it is its turn; 0 up to
            network.heartbeat.
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
    """A run as it stands.

    Attributes:
        metric: the name of the headline metric.
        rows: which rows its evaluations use, "validation" or "test".
        share: how far it is towards its limits, 0 to 1.
        seconds: on the run's own clock.
        rate: updates per second of the wall's clock.
        waiting: what it waits for; empty while it goes on.
        baselines: what it has to beat.
        at: when this was written, in seconds since 1970.
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
        """As `write` left it.

        Raises:
            TypeError: it did not.
        """
        clients = tuple(map(_client, document.pop("clients", ())))
        baselines = checked_baselines(document.pop("baselines", {}))
        status = cls(**document, clients=clients, baselines=baselines)
        _check(status)
        for client in clients:
            _check(client)
        return status

    def write(self, folder: Path) -> None:
        content = json.dumps(asdict(self)).encode()
        write_atomically(folder / STATUS, content, durable=False)


def checked_baselines(document: Any) -> Baselines:
    """Return `document` if it is what a run writes as its baselines.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(document, dict):
        raise TypeError(f"baselines {document!r}")
    return {name: {rows: checked_figures(own[rows]) for rows in own} for name, own in document.items()}


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


def _check(made: Status | ClientStatus) -> None:
    """Raise TypeError unless words are words, and numbers are finite ones."""
    for each in fields(made):
        value = getattr(made, each.name)
        if each.name == "alarms":
            fits = isinstance(value, tuple) and all(isinstance(one, str) for one in value)
        else:
            checked = each.name in ("clients", "baselines")
            fits = checked or (isinstance(value, str) if each.type is str else _is_number(value))
        if not fits:
            raise TypeError(f"{each.name} {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < _BEYOND
