"""One training run, whatever moves it: advance, look at it now and then, stop when it is time."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from vafl.config.run_settings import EvaluationSettings, StopSettings
from vafl.errors import Stalled
from vafl.models.metrics import Figures, Metrics
from vafl.observe.evaluation import Clock, Evaluation
from vafl.protocol.centralised import Centralised
from vafl.protocol.losslog import LossLog
from vafl.transport.traffic import Traffic

BUDGETS_SPENT = "too few clients may still upload: their privacy budgets are spent"


class Best(Protocol):
    """Keeps the models of the best evaluation so far, for a run with patience.

    Attributes:
        point: that evaluation; None before the first.
        count: how many were the best so far.
    """

    point: Evaluation | None
    count: int

    def keep(self, point: Evaluation) -> None:
        """Keep the models as they are now. This evaluation of them is the best so far."""

    def restore(self) -> None:
        """Go back to the models that were kept last, if any, and to what the evaluation measured."""


class BestModels:
    """Keeps one copy of all modules in memory.

    Args:
        measured: the outputs of the last evaluation by part, which `restore` brings back too.
    """

    def __init__(self, modules: Sequence[nn.Module], measured: dict[str, Tensor]) -> None:
        self._modules, self._measured = modules, measured
        self._states: list[dict[str, Tensor]] = []
        self._outputs: dict[str, Tensor] = {}
        self.point: Evaluation | None = None
        self.count = 0

    def keep(self, point: Evaluation) -> None:
        self.point, self.count = point, self.count + 1
        self._outputs = dict(self._measured)
        self._states = [
            {name: tensor.clone() for name, tensor in module.state_dict().items()} for module in self._modules
        ]

    def restore(self) -> None:
        for module, state in zip(self._modules, self._states, strict=False):
            module.load_state_dict(state)
        self._measured.update(self._outputs)


class Watch:
    """Decides after each evaluation whether it ends the run, and whether its models are the best so far.

    `stop.metric` is a target for the headline metric. What is best, and how long `stop.patience` waits for
    something better, goes by the metric that `stop.select` names.

    Args:
        best: keeps the best models; None if nothing is to be kept.

    Attributes:
        ended: why the run has ended, for whatever reason; empty before.
    """

    def __init__(self, stop: StopSettings, metrics: Metrics, best: Best | None = None) -> None:
        self._stop, self._metrics = stop, metrics
        self._best: float | None = None
        self._since = 0
        self.best = best
        self.ended = ""

    @property
    def headline(self) -> str:
        """The name of the headline metric."""
        return self._metrics.headline.name

    def sees(self, point: Evaluation) -> str:
        """Take an evaluation of the models as they are now.

        Returns:
            Why the run ends with it; empty if it goes on. Clients are told this reason, so it must not
            contain figures: those depend on labels that are not theirs.
        """
        reason = self.recalls(point)
        if self.best is not None and not self._since:
            self.best.keep(point)
        return reason

    def recalls(self, point: Evaluation) -> str:
        """Take an evaluation that was made before this process started; return as `sees` does."""
        stop, headline, select = self._stop, self._metrics.headline, self._metrics.select
        value = point.metrics[select.name]
        if value is not None and (self._best is None or select.is_better(value, self._best)):
            self._best, self._since = value, 0
        else:
            self._since += 1
        reached = point.metrics[headline.name]
        if stop.metric is not None and reached is not None and headline.reaches(reached, stop.metric):
            return f"{headline.name} is what stop.metric asks for"
        if stop.patience and self._since >= stop.patience:
            return f"{select.name} has not been better for {self._since} evaluations"
        return ""


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


def train(
    runtime: Runtime,
    evaluate: Callable[[], Figures],
    watch: Watch,
    stop: StopSettings,
    evaluation: EvaluationSettings,
    observe: Callable[[Evaluation], None],
) -> list[Evaluation]:
    """Runs until a stop criterion holds; evaluates at the start, at every interval and at the end.

    An interrupt ends it after one more evaluation, and is raised again.

    Raises:
        Stalled: no step will be made any more, and no time is set at which the run ends all the same.
    """
    points: list[Evaluation] = []

    def look() -> str:
        points.append(measure(runtime, evaluate, watch.headline))
        reason = watch.sees(points[-1])
        observe(points[-1])
        return reason

    try:
        look()
        due = _next_due(runtime, evaluation)
        while not (over := why_over(runtime, stop, spent=runtime.over)):
            runtime.advance()
            if not stop.seconds and (why := runtime.stalled):
                raise Stalled("VFL-7051", f"no step will be made after {runtime.updates} updates: {why}")
            if _progress(runtime, evaluation) < due or why_over(runtime, stop, spent=runtime.over):
                continue
            due = _next_due(runtime, evaluation)
            if reason := look():
                watch.ended = reason  # with the models as they were measured: nothing more arrives
                return points
        watch.ended = over
        runtime.settle()
        look()
    except KeyboardInterrupt:
        watch.ended = "it was told to stop"
        look()
        raise
    finally:
        if watch.best is not None:
            watch.best.restore()
    return points


def why_over(clock: Clock, stop: StopSettings, *, spent: bool) -> str:
    """Why a run ends now, whatever its evaluations say; empty while it does not.

    Args:
        spent: whether no step can be made any more.
    """
    if clock.updates >= stop.updates:
        return f"{clock.updates} updates were made"
    if stop.seconds and clock.now >= stop.seconds:
        return f"{clock.now:.0f} seconds have passed"
    return BUDGETS_SPENT if spent else ""


def is_in_vain(ended: str, updates: int) -> bool:
    """Whether the budgets did not allow a single step: that is no result."""
    return ended == BUDGETS_SPENT and not updates


def _progress(runtime: Runtime, evaluation: EvaluationSettings) -> float:
    return runtime.now if evaluation.every_seconds else runtime.updates


def _next_due(runtime: Runtime, evaluation: EvaluationSettings) -> float:
    interval = evaluation.every_seconds or evaluation.every
    return (_progress(runtime, evaluation) // interval + 1) * interval


def measure(runtime: Runtime, evaluate: Callable[[], Figures], headline: str) -> Evaluation:
    """Evaluate the models as they are now."""
    figures = evaluate()
    return Evaluation(
        seconds=runtime.now,
        updates=runtime.updates,
        bytes_up=sum(traffic.bytes_up for traffic in runtime.traffic),
        bytes_down=sum(traffic.bytes_down for traffic in runtime.traffic),
        train_loss=runtime.losses.take_mean(),
        metric=figures[headline],
        metrics=figures,
    )
