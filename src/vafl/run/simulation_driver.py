"""Drives a run in one process: the simulator's, or a centralised one. The run controller decides."""

from collections.abc import Callable
from typing import Protocol

from vafl.config.run_settings import EvaluationSettings, StopSettings
from vafl.errors import Stalled
from vafl.models.metrics import Figures, Metrics
from vafl.observe.evaluation import Clock, Evaluation
from vafl.protocol.centralised import Centralised
from vafl.protocol.losslog import LossLog
from vafl.run.best import Best
from vafl.run.controller import End, Ending, RunController, Step
from vafl.transport.traffic import Traffic


class Runtime(Clock, Protocol):
    """What makes the training steps.

    Attributes:
        traffic: bytes that each client has sent and received.
    """

    traffic: list[Traffic]

    @property
    def losses(self) -> LossLog:
        """The training losses since the last evaluation."""

    @property
    def over(self) -> bool:
        """Return whether no step can be made any more, because clients have spent their privacy budgets."""

    @property
    def stalled(self) -> str:
        """Why nothing will happen any more; empty while something will."""

    def advance(self) -> None:
        """Process the next event."""

    def settle(self) -> None:
        """Deliver the messages that are in flight. No step is made for them."""


class CentralisedRuntime:
    """Makes the steps of the centralised trainer. It waits for no client, so its clock stands still."""

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
        """Do nothing: there are no messages."""


class SimulationDriver:
    """Trains until the run controller ends the run.

    Args:
        runtime: makes the steps.
        evaluate: measures the models as they are now.
        metrics: the run's metrics.
        observe: called with every evaluation.
        best: keeps the best models, and restores them at the end; None keeps nothing.

    Attributes:
        controller: decides when to evaluate and when to end.
        evaluations: those made so far.
    """

    def __init__(
        self,
        runtime: Runtime,
        evaluate: Callable[[], Figures],
        metrics: Metrics,
        stop: StopSettings,
        evaluation: EvaluationSettings,
        observe: Callable[[Evaluation], None],
        best: Best | None = None,
    ) -> None:
        self._runtime, self._evaluate, self._observe, self._best = runtime, evaluate, observe, best
        self._headline = metrics.headline.name
        self._may_wait = stop.seconds > 0  # for the end, though no step will be made
        self.controller = RunController(stop, evaluation, metrics, settles=True)
        self.evaluations: list[Evaluation] = []

    def train(self) -> None:
        """Train to the end.

        After an interrupt, the models are evaluated once more and KeyboardInterrupt is raised again.

        Raises:
            Stalled: no step will be made any more, and the run has no time limit that would end it.
        """
        try:
            try:
                self._drive()
            except KeyboardInterrupt:
                self.controller.interrupt()
                self._drive()
                raise
        except BaseException:
            self.controller.abort()
            raise
        finally:
            if self._best is not None:
                self._best.restore()

    def _drive(self) -> None:
        runtime, controller = self._runtime, self.controller
        while (step := controller.next(runtime, self._blocked())) is not Step.STOP:
            if step is Step.TRAIN:
                runtime.advance()
                self._require_progress()
                continue
            if controller.end is not None and not controller.interrupted:
                runtime.settle()
            self._measure()

    def _blocked(self) -> End | None:
        return End.of(Ending.BUDGETS_SPENT) if self._runtime.over else None

    def _require_progress(self) -> None:
        runtime = self._runtime
        if not self._may_wait and (why := runtime.stalled):
            raise Stalled("VFL-7051", f"no step will be made after {runtime.updates} updates: {why}")

    def _measure(self) -> None:
        self.controller.evaluation_begun()
        evaluation = measure(self._runtime, self._evaluate, self._headline)
        self.evaluations.append(evaluation)
        if self.controller.evaluated(self._runtime, evaluation) and self._best is not None:
            self._best.keep(evaluation)
        self._observe(evaluation)


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
