"""The state machine of a training run: when to train, evaluate, test, save and end.

The simulator (run/simulation_driver.py) and the network (run/network_driver.py) drive it. A driver reports
events to the controller and asks it for the next step; the driver does the work. The controller itself does
no I/O, holds no model and reads no clock: the driver passes in the run's clock.

                       evaluation_begun                evaluated
           STARTING ──────────────────────> EVALUATING ──────────> TRAINING
              │                               │    ^                 │  │
              │                               │    └─────────────────┘  │
              │                               │     evaluation_begun    │
              │ limit or interrupt            │ evaluated: it was       │ limit or interrupt
              │                               v the last                │
              └───────────────────────────> ENDING <────────────────────┘

        ENDING ──evaluation_begun──> EVALUATING ──evaluated──> ENDING    if the models changed since the last
        ENDING ──test_begun──> TESTING ──tested──> ENDING                if there are test rows, once
        ENDING ──> SAVING ──saved──> ENDED                               when nothing is left to measure

`abort` leads from every phase to ENDED. A run without test rows skips TESTING. A run without checkpoints
(the simulator's; its caller tests and saves the models) goes from ENDING to ENDED.

Invariants:

- A driver makes training steps only in STARTING, TRAINING and EVALUATING. Once `end` is set, it makes none.
- `end` is set exactly when the phase is ENDING or follows it, and only `abort` changes it afterwards.
- The models that a run ends with were evaluated after their last step, or the evaluation was tried: clients
  may not answer.
- Limits and interrupts take effect between evaluations. An evaluation under way is finished first.
- A checkpoint can be due in any phase before SAVING: checkpoints do not wait for evaluations.
- The text of an `End` has no metric's value. Clients receive it, and metrics depend on labels that they must
  not learn.
"""

from dataclasses import dataclass
from enum import Enum, auto

from vafl.config.run_settings import EvaluationSettings, StopSettings
from vafl.models.metrics import Metrics
from vafl.observe.evaluation import Clock, Evaluation


class Phase(Enum):
    """Where a run is. The module's docstring has the transitions."""

    STARTING = auto()  # no evaluation was begun by this process
    TRAINING = auto()
    EVALUATING = auto()  # an evaluation of the held-out rows is under way
    ENDING = auto()  # the reason to end is known: no more training steps
    TESTING = auto()  # the last evaluation, of the test rows, is under way
    SAVING = auto()  # the last checkpoint is due
    ENDED = auto()


class Step(Enum):
    """What a driver does next.

    EVALUATE and TEST are returned until the driver reports the result, so a driver may begin them later, or
    begin them again.
    """

    TRAIN = auto()
    EVALUATE = auto()
    TEST = auto()
    SAVE = auto()
    STOP = auto()


class Ending(Enum):
    """Why a run ended. The value is the explanation for people, with placeholders for `End.of`."""

    UPDATES = "{updates} updates were made"
    SECONDS = "{seconds:.0f} seconds have passed"
    METRIC_REACHED = "{metric} is what stop.metric asks for"
    NO_IMPROVEMENT = "{metric} has not been better for {evaluations} evaluations"
    BUDGETS_SPENT = "too few clients may still upload: their privacy budgets are spent"
    CLIENTS_SILENT = "no step can be made: {clients} did not answer in time"
    INTERRUPTED = "the run was told to stop"
    FAILED = "an error ended the run"


@dataclass(frozen=True)
class End:
    """Why one run ended: the reason, and its explanation with this run's figures."""

    reason: Ending
    text: str

    @classmethod
    def of(cls, reason: Ending, **figures: object) -> "End":
        """Fill the placeholders of the reason's explanation."""
        return cls(reason, reason.value.format(**figures))

    def is_in_vain(self, updates: int) -> bool:
        """Return whether the privacy budgets did not allow a single step: such a run has no result."""
        return self.reason is Ending.BUDGETS_SPENT and not updates


class RunController:
    """Decides what a run does next.

    `stop.metric` is a target for the headline metric. The metric that `stop.select` names decides which
    evaluation is the best, and when `stop.patience` ends the run.

    Args:
        has_test_rows: whether the run measures test rows at its end, apart from the rows it evaluates.
        checkpoint_every: updates between two checkpoints; 0 makes none, not even at the end.
        settles: whether messages that are in flight at the last step still change models. Then a run that a
            limit ends is always evaluated once more. Otherwise, an evaluation after the last step suffices.
        has_result: whether the run has an evaluation from before this process.

    Attributes:
        phase: where the run is.
        end: why the run ends; None before that is known.
        interrupted: whether the run was told to stop before it had ended.
        has_result: whether there is an evaluation.
    """

    def __init__(
        self,
        stop: StopSettings,
        evaluation: EvaluationSettings,
        metrics: Metrics,
        *,
        has_test_rows: bool = False,
        checkpoint_every: int = 0,
        settles: bool = False,
        has_result: bool = False,
    ) -> None:
        self._stop, self._evaluation, self._metrics = stop, evaluation, metrics
        self._has_test_rows, self._checkpoint_every, self._settles = has_test_rows, checkpoint_every, settles
        self.phase = Phase.STARTING
        self.end: End | None = None
        self.interrupted = False
        self.has_result = has_result
        self._best: float | None = None  # value of the selecting metric
        self._since_best = 0  # evaluations
        self._due = 0.0  # progress at which the next evaluation is due
        self._evaluated_at: int | None = None  # updates at the last evaluation; None: the models have changed
        self._checkpointed_at = 0  # updates
        self._tested = False

    # --- the question ---

    def next(self, clock: Clock, blocked: End | None = None) -> Step:
        """Return what to do next.

        Args:
            clock: how far the run is.
            blocked: why no step can be made any more; None if steps are possible.
        """
        if self.phase in (Phase.STARTING, Phase.TRAINING):
            if end := self._limit(clock, blocked):
                self._set_end(end)
                if self._settles:
                    self._evaluated_at = None
            elif self._progress(clock) >= self._due:
                return Step.EVALUATE
            else:
                return Step.TRAIN
        if self.phase is Phase.ENDING:
            return self._last_steps(clock)
        return {
            Phase.EVALUATING: Step.EVALUATE,
            Phase.TESTING: Step.TEST,
            Phase.SAVING: Step.SAVE,
            Phase.ENDED: Step.STOP,
        }[self.phase]

    def is_checkpoint_due(self, updates: int, lag: int = 0) -> bool:
        """Return whether to write a checkpoint now.

        Args:
            updates: made so far.
            lag: how many uploads of one client the last checkpoint lacks, beyond those that may be waiting
                for a step. Skipped uploads make no update, and a crash must not lose too many of them.
        """
        since = max(updates - self._checkpointed_at, lag)
        return 0 < self._checkpoint_every <= since

    # --- events ---

    def recall(self, evaluation: Evaluation) -> None:
        """Count an evaluation that was made before this process started."""
        self._compare(evaluation)

    def interrupt(self) -> None:
        """The run was told to stop. It ends after one more evaluation."""
        if self.phase is not Phase.ENDED:
            self.interrupted = True

    def evaluation_begun(self) -> None:
        """An evaluation of the held-out rows is under way."""
        self.phase = Phase.EVALUATING

    def evaluated(self, clock: Clock, evaluation: Evaluation | None) -> bool:
        """The evaluation under way is finished.

        Args:
            clock: how far the run is now.
            evaluation: its result; None if nothing could be measured.

        Returns:
            Whether it is the best so far. A driver that keeps the best models must keep these.
        """
        self._evaluated_at, self._due = clock.updates, self._next_due(clock)
        is_best = False
        end = End.of(Ending.INTERRUPTED) if self.interrupted else None
        if evaluation is not None:
            self.has_result = True
            is_best = self._compare(evaluation)
            end = end or self._verdict(evaluation)
        if self.end is not None:
            self.phase = Phase.ENDING
        elif end is not None:
            self._set_end(end)
        else:
            self.phase = Phase.TRAINING
        return is_best

    def test_begun(self) -> None:
        """The evaluation of the test rows is under way."""
        self.phase = Phase.TESTING

    def tested(self) -> None:
        """The evaluation of the test rows is finished, whether or not anything could be measured."""
        self.phase, self._tested = Phase.ENDING, True

    def checkpointed(self, updates: int) -> None:
        """A checkpoint holds everything up to this number of updates."""
        self._checkpointed_at = updates

    def saved(self) -> None:
        """The last checkpoint is written."""
        self.phase = Phase.ENDED

    def abort(self) -> None:
        """End the run at once: an error occurred, or the run was told to stop and not to finish its work."""
        self.end = End.of(Ending.INTERRUPTED if self.interrupted else Ending.FAILED)
        self.phase = Phase.ENDED

    # --- decisions ---

    def _limit(self, clock: Clock, blocked: End | None) -> End | None:
        """Return why the run ends now, whatever its evaluations show; None if it goes on."""
        stop = self._stop
        if self.interrupted:
            return End.of(Ending.INTERRUPTED)
        if clock.updates >= stop.updates:
            return End.of(Ending.UPDATES, updates=clock.updates)
        if stop.seconds and clock.now >= stop.seconds:
            return End.of(Ending.SECONDS, seconds=clock.now)
        return blocked

    def _set_end(self, end: End) -> None:
        self.end, self.phase = end, Phase.ENDING

    def _last_steps(self, clock: Clock) -> Step:
        """Return what is left to do in ENDING."""
        if self._evaluated_at != clock.updates:
            return Step.EVALUATE
        if self._has_test_rows and not self._tested:
            return Step.TEST
        if not self._checkpoint_every:
            self.phase = Phase.ENDED
            return Step.STOP
        self.phase = Phase.SAVING
        return Step.SAVE

    def _compare(self, evaluation: Evaluation) -> bool:
        """Take an evaluation into account; return whether it is the best so far."""
        select = self._metrics.select
        value = evaluation.metrics[select.name]
        if value is not None and (self._best is None or select.is_better(value, self._best)):
            self._best, self._since_best = value, 0
            return True
        self._since_best += 1
        return False

    def _verdict(self, evaluation: Evaluation) -> End | None:
        """Return why the run ends with this evaluation; None if it goes on."""
        stop, headline = self._stop, self._metrics.headline
        value = evaluation.metrics[headline.name]
        if stop.metric is not None and value is not None and headline.reaches(value, stop.metric):
            return End.of(Ending.METRIC_REACHED, metric=headline.name)
        if stop.patience and self._since_best >= stop.patience:
            name = self._metrics.select.name
            return End.of(Ending.NO_IMPROVEMENT, metric=name, evaluations=self._since_best)
        return None

    def _progress(self, clock: Clock) -> float:
        """Return how far the run is, in the unit of the evaluation interval: seconds or updates."""
        return clock.now if self._evaluation.every_seconds else clock.updates

    def _next_due(self, clock: Clock) -> float:
        # Multiples of the interval, so that steps that come several at once do not shift the later ones.
        interval = self._evaluation.every_seconds or self._evaluation.every
        return (self._progress(clock) // interval + 1) * interval
