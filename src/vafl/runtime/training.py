"""One training run, whatever moves it: advance, look at it now and then, stop when it is time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from vafl.errors import Stalled
from vafl.models.losses import Metric
from vafl.protocol.centralised import Centralised
from vafl.protocol.losslog import LossLog
from vafl.protocol.respondent import embed
from vafl.runtime.settings import EvaluationSettings, StopSettings
from vafl.runtime.simulator import Traffic


@dataclass(frozen=True)
class Point:
    """One evaluation: a line of history.jsonl."""

    seconds: float
    updates: int
    bytes_up: int
    bytes_down: int
    train_loss: float | None
    metric: float


class Watch:
    """Says when a run's evaluations are reason enough to end it."""

    def __init__(self, stop: StopSettings, metric: Metric) -> None:
        self._stop, self._metric = stop, metric
        self._best: float | None = None
        self._since = 0

    def ends(self, value: float) -> str:
        """Takes the next evaluation; gives why it is the last, or nothing."""
        stop, metric = self._stop, self._metric
        if self._best is None or not metric.reaches(self._best, value):
            self._best, self._since = value, 0
        else:
            self._since += 1
        if stop.metric is not None and metric.reaches(value, stop.metric):
            return f"{metric.name} reached {value:.4f}"
        if stop.patience and self._since >= stop.patience:
            return f"{metric.name} has not been better than {self._best:.4f} for {self._since} evaluations"
        return ""


class Clock(Protocol):
    """How far a run is."""

    @property
    def now(self) -> float: ...

    @property
    def updates(self) -> int: ...


class Runtime(Clock, Protocol):
    """What a run needs of whatever moves it."""

    traffic: list[Traffic]

    @property
    def losses(self) -> LossLog: ...

    @property
    def over(self) -> bool: ...

    @property
    def stalled(self) -> str: ...

    def advance(self) -> None: ...

    def settle(self) -> None: ...


class CentralisedRuntime:
    """Moves the centralised trainer. It has nobody to wait for: its clock stands still."""

    def __init__(self, trainer: Centralised) -> None:
        self.trainer = trainer
        self.now = 0.0
        self.over = False
        self.traffic: list[Traffic] = []
        self.stalled = ""

    @property
    def updates(self) -> int:
        return self.trainer.iteration

    @property
    def losses(self) -> LossLog:
        return self.trainer.losses

    def advance(self) -> None:
        self.trainer.step()

    def settle(self) -> None:
        """Nothing is ever under way here."""


class Evaluator:
    """Measures the whole model on rows held out. It sees every party's model: a simulator may.

    Args:
        models, features: of each party; features are [test rows, ...].
        summed: whether the head sees the sum or the concatenation of the embeddings.
        validation: so many rows, the first, are to watch the training by, and not to test it.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        features: Sequence[Tensor],
        head: nn.Module,
        labels: Tensor,
        metric: Metric,
        *,
        summed: bool,
        validation: int = 0,
    ) -> None:
        self._models, self._features = list(models), list(features)
        self._head, self._labels, self._metric, self._summed = head, labels, metric, summed
        self._validation = validation

    def __call__(self) -> float:
        return self._measure(slice(0, self._validation or None))

    def test(self) -> float | None:
        """On the rows that nothing was chosen by; None if those are the ones watched."""
        return self._measure(slice(self._validation, None)) if self._validation else None

    def _measure(self, rows: slice) -> float:
        return self._metric.measure(self.outputs([own[rows] for own in self._features]), self._labels[rows])

    def outputs(self, features: Sequence[Tensor]) -> Tensor:
        """The head's outputs [rows, outputs] for one feature tensor a party."""
        return outputs(self._models, self._head, features, summed=self._summed)


@torch.no_grad()
def outputs(
    models: Sequence[nn.Module], head: nn.Module, features: Sequence[Tensor], *, summed: bool
) -> Tensor:
    """What the whole model says, [rows, outputs], given every party's features."""
    with _evaluating([*models, head]):
        parts = [embed(model, own) for model, own in zip(models, features, strict=True)]
        inputs = torch.stack(parts).sum(0) if summed else torch.cat(parts, dim=1)
        return head(inputs)  # type: ignore[no-any-return]


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:
            module.train()


def train(
    runtime: Runtime,
    evaluate: Callable[[], float],
    metric: Metric,
    stop: StopSettings,
    evaluation: EvaluationSettings,
    observe: Callable[[Point], None],
) -> list[Point]:
    """Runs until a stop criterion holds; evaluates at the start, at every interval and at the end.

    Raises:
        Stalled: no step will be made any more, and no time is set at which the run ends all the same.
    """
    points = [measure(runtime, evaluate)]
    observe(points[0])
    watch = Watch(stop, metric)
    watch.ends(points[0].metric)
    due = _next_due(runtime, evaluation)
    while not _over(runtime, stop):
        runtime.advance()
        if not stop.seconds and (reason := runtime.stalled):
            raise Stalled(f"no step will be made after {runtime.updates} updates: {reason}")
        if _progress(runtime, evaluation) < due or _over(runtime, stop):
            continue
        points.append(measure(runtime, evaluate))
        observe(points[-1])
        due = _next_due(runtime, evaluation)
        if watch.ends(points[-1].metric):
            runtime.settle()
            return points
    runtime.settle()
    points.append(measure(runtime, evaluate))
    observe(points[-1])
    return points


def _over(runtime: Runtime, stop: StopSettings) -> bool:
    out_of_time = bool(stop.seconds and runtime.now >= stop.seconds)
    return runtime.updates >= stop.updates or out_of_time or runtime.over


def _progress(runtime: Runtime, evaluation: EvaluationSettings) -> float:
    return runtime.now if evaluation.every_seconds else runtime.updates


def _next_due(runtime: Runtime, evaluation: EvaluationSettings) -> float:
    interval = evaluation.every_seconds or evaluation.every
    return (_progress(runtime, evaluation) // interval + 1) * interval


def measure(runtime: Runtime, evaluate: Callable[[], float]) -> Point:
    """An evaluation, now."""
    return Point(
        seconds=runtime.now,
        updates=runtime.updates,
        bytes_up=sum(traffic.bytes_up for traffic in runtime.traffic),
        bytes_down=sum(traffic.bytes_down for traffic in runtime.traffic),
        train_loss=runtime.losses.take_mean(),
        metric=evaluate(),
    )
