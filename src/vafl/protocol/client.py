"""A client: picks a minibatch, embeds it, uploads, and steps its own model on the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from vafl import kernels
from vafl.errors import InvalidMessage
from vafl.protocol.descent import Descent
from vafl.protocol.gradient_limit import GradientLimit
from vafl.protocol.gradients import (
    PullBack,
    TensorPass,
    ages,
    by_tensors,
    followed_by,
    model_with_way_back,
)
from vafl.protocol.messages import (
    ClientMessage,
    Evaluate,
    Finished,
    Gradient,
    Join,
    Query,
    Refresh,
    Request,
    ServerMessage,
    Skipped,
    Upload,
    Welcome,
    made_here,
)
from vafl.protocol.prediction_client import Budget, Perturb, PredictionClient, UploadKind
from vafl.protocol.rows import Array, Matrix, Rows, in_parts
from vafl.protocol.schedule import BatchSchedule
from vafl.protocol.schedule import Refresh as RefreshPolicy
from vafl.protocol.settings import RuleSettings


class AtEvaluation(Protocol):
    """Saves the model before the client answers an evaluation, or restores the best model.

    `best` and `restore` are as in `Evaluate`.
    """

    def __call__(self, best: int, *, restore: bool) -> None: ...


@dataclass(slots=True)
class Flight:
    """An upload whose gradient has not come yet.

    `pull_back` takes it to theta_m's, and may be valid only while theta_m is unchanged, that is while
    `version` is the client's. `behind` uploads were in flight already when it was made, and `latest` was the
    last iteration of the server that the client knew of.
    """

    rows: Rows
    embeddings: Matrix
    pull_back: PullBack
    version: int
    behind: int
    latest: int


@dataclass(slots=True)
class Staleness:
    """How old a client's uploads were when the server stepped on them, as far as the client can tell.

    The delay of an upload is the number of steps that the server made after the last one that the client knew
    of, and before the one that used the upload.
    """

    answers: int = 0
    total: int = 0
    largest: int = 0

    def note(self, delay: int) -> None:
        """Count one more upload."""
        self.answers, self.total = self.answers + 1, self.total + delay
        self.largest = max(self.largest, delay)

    @property
    def mean(self) -> float:
        return self.total / max(1, self.answers)


class Client(PredictionClient):
    """Holds the features and the embedding model theta_m of one party.

    Args:
        index: which column of the server's table is this client's.
        features: [rows, ...], the party's own features, one line a record: the rows the schedule deals
            out, and after them any that are held out for evaluation and only sent when asked for.
        model: maps features to embeddings [batch, width]. It answers evaluations, and is kept at the end.
        descent: steps the model's parameters.
        schedule: which rows to pick at which activation.
        refresh: which other rows to upload.
        rule: the order of Algorithm 1, local steps, start.
        l2: coefficient of the regulariser l2/2 |theta_m|^2.
        embed_batch: how a batch (its features, its rows) is embedded and slopes are taken back to the
            parameters' gradients, if not by plain differentiation.
        perturb: makes embeddings of what the model gives before they leave, or None.
        budget: limits what may be uploaded, or None.

    Attributes:
        finished: why the client makes no more uploads; empty while it does.
        run: the run's random number, as the server has said it last.
        latest: the last iteration of the server that it was told; -1 if none.
        staleness: delays of its uploads since the process began.
        gradient_limit: scales down gradients that no honest server sends, and counts them.
        refresh_rows: so many rows at most are refreshed in one message; None: all of them.
        at_evaluation: called before the client answers an `Evaluate` of a run that ends with its best models.
    """

    def __init__(
        self,
        index: int,
        features: Tensor,
        model: nn.Module,
        descent: Descent,
        schedule: BatchSchedule,
        refresh: RefreshPolicy,
        rule: RuleSettings,
        *,
        l2: float = 0.0,
        embed_batch: TensorPass | None = None,
        perturb: Perturb | None = None,
        budget: Budget | None = None,
    ) -> None:
        super().__init__(index, features, model, perturb=perturb, budget=budget)
        self.activation = 0
        self.iteration = self.latest = -1
        self.run = 0
        self.refresh_rows: int | None = None
        self.at_evaluation: AtEvaluation | None = None
        self.descent = descent
        self._trained = descent.trains(model)
        self.gradient_limit = GradientLimit()
        self.staleness = Staleness()
        self._schedule, self._refresh, self._rule, self._l2 = schedule, refresh, rule, l2
        self._inputs = self._features.numpy()
        self._embed = (
            by_tensors(embed_batch) if embed_batch else model_with_way_back(self._trained, descent.parameters)
        )
        self._version = 0
        self._flights: dict[int, Flight] = {}
        self._queried = -1

    @property
    def owed(self) -> int:
        """How many answers the server owes."""
        return int(self._queried >= 0) if self._rule.order == "query-first" else len(self._flights)

    @property
    def waiting(self) -> bool:
        """Whether as many answers are owed as may be, so that the client cannot begin an activation."""
        return self.owed >= (self._rule.window or 1) or bool(self.finished)

    @property
    def server_fault(self) -> str:
        limit = self.gradient_limit
        if not limit.scaled:
            return ""
        return f"{limit.scaled} gradients of norm up to {limit.largest:.3g}, where {limit.usual:.3g} is usual"

    def join(self) -> Join:
        """What the client says first on a connection: where it stands."""
        self._sequence = 0
        return Join(self.index, self.activation, self.applied, self.iteration)

    @property
    def applied(self) -> int:
        """How many uploads were answered: those still in flight are the newest."""
        return min(self._flights, default=self.activation)

    def restore(self, activation: int, iteration: int, optimiser: dict[str, Any]) -> None:
        """Goes back to a checkpoint. The model is restored by whoever made it."""
        self.activation, self.iteration = activation, iteration
        self.descent.restore(optimiser)

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Takes other parameters for its model; what is in flight is embedded again when it is answered."""
        self.model.load_state_dict(parameters)
        self._version += 1

    @np.errstate(all="ignore")  # as in `receive`
    def wake(self) -> list[ClientMessage]:
        """Begins an activation. Call it only when not `waiting`."""
        if self._rule.order == "query-first" and self._flights:
            self._queried = next(iter(self._flights))
            return self._with_mark([Query(self.index, self._next(), self._queried)])
        first: list[ClientMessage] = []
        if self._rule.start == "upload" and self.activation == 0:
            first = self._refreshed(None)
        return self._with_mark([*first, *self._upload()])

    def _take(self, message: ServerMessage) -> list[ClientMessage]:
        if isinstance(message, Welcome):
            super()._take(message)  # stops a client whose ledger is not the newest
            return self._rejoin(message)
        if isinstance(message, Evaluate):
            self._check_rows(message.rows)
            return self._evaluated(message)
        if not isinstance(message, (Gradient, Skipped)):
            return super()._take(message)
        if message.activation < self.applied:
            return []  # said again because it might have been lost; it was not
        self._check_answer(message)
        flight = self._flights.pop(message.activation)
        self.latest = message.iteration - isinstance(message, Skipped)  # which counts steps from 1
        self._queried = -1
        if isinstance(message, Gradient):
            self.staleness.note(max(0, message.iteration - flight.latest - 1))
            self._apply(flight, message)
        return self._end_activation(message.activations)

    def _check_answer(self, answer: Gradient | Skipped) -> None:
        flight = self._flights.get(answer.activation)
        if flight is None:
            raise InvalidMessage("VFL-4001", f"activation {answer.activation} is not waiting for an answer.")
        if isinstance(answer, Gradient) and answer.gradients.shape != flight.embeddings.shape:
            raise InvalidMessage(
                "VFL-4002",
                f"gradients of activation {answer.activation} must be {list(flight.embeddings.shape)}. "
                f"Found {list(answer.gradients.shape)}.",
            )

    def _rejoin(self, welcome: Welcome) -> list[ClientMessage]:
        """Says again what the server never got; goes on where the server stands if that is further."""
        known = welcome.activations[self.index]
        self._queried = -1
        self.run, self.latest = welcome.run, welcome.iteration - 1
        self.iteration = min(self.iteration, welcome.iteration)  # what it forgot will be counted again
        if known > self.activation:
            self._flights.clear()
            self.activation = known
        missing = [activation for activation in self._flights if activation >= known]
        again = [said for each in missing for said in self._say(each, self._flights[each])]
        return [*again, self._finish(self.finished)] if self.finished else again

    def _upload(self) -> list[ClientMessage]:
        rows = self._schedule.batch(self.activation)
        if self._budget is not None:
            rows = self._budget.spend(rows, "batch", whole=self._rule.name == "sync")
            if not len(rows):
                reason = f"the privacy budget of the rows of activation {self.activation} is spent"
                return [self._finish(reason)]
        behind = len(self._flights)
        flight = Flight(rows, *self._embed_batch(rows), self._version, behind, self.latest)
        self._flights[self.activation] = flight
        self.activation += 1
        return self._say(self.activation - 1, flight)

    def _finish(self, reason: str) -> Finished:
        self.finished = reason
        return Finished(self.index, self._next(), reason)

    def _say(self, activation: int, flight: Flight) -> list[ClientMessage]:
        """The same upload each time it is said: a retry carries the bytes of the first try."""
        first_order = self._rule.order == "upload-first"
        with made_here():
            upload = Upload(
                client=self.index,
                sequence=self._next(),
                activation=activation,
                rows=flight.rows,
                embeddings=flight.embeddings,
                answer=first_order,
                in_flight=flight.behind,
            )
        return [upload]

    def _embed_batch(self, rows: Rows) -> tuple[Matrix, PullBack]:
        embedded = self._embed(kernels.gather(self._inputs, rows), rows)
        return embedded if self._perturb is None else followed_by(self._perturb, embedded)

    def _apply(self, flight: Flight, answer: Gradient) -> None:
        """theta_m <- theta_m - eta (grad h * gradient + grad r), Q times."""
        if not self.descent.parameters:  # a fixed embedding
            return
        gradients = self.gradient_limit(answer.gradients)
        for _ in range(self._rule.local_steps):
            current = flight.version == self._version or not ages(flight.pull_back)
            pull_back = flight.pull_back if current else self._embed_batch(flight.rows)[1]
            self._step(pull_back(gradients), answer.iteration)

    def _step(self, gradients: Sequence[Array], iteration: int) -> None:
        self.descent.step(gradients, iteration, l2=self._l2)
        self._version += 1
        self.iteration = iteration

    def _end_activation(self, activations: Sequence[int]) -> list[ClientMessage]:
        """With the model just updated: the next upload (query-first order), and the refresh."""
        said = self._upload() if self._rule.order == "query-first" else []
        rows = self._refresh.rows(activations)
        if rows is None or len(rows):
            said += self._refreshed(rows)
        return said

    def _answer(self, request: Request) -> list[ClientMessage]:
        """Answer with the training model's embeddings of all rows asked for, or decline."""
        rows, training = request.rows, self._schedule.rows
        if len(rows) and int(rows.max()) >= training:
            raise InvalidMessage(
                "VFL-4003",
                f"a request must name training rows, below {training}. Found row {int(rows.max())}, which is "
                "held out.",
            )
        if not self._may_send(rows, "request"):
            return [self._decline(request.number)]
        embeddings = self._embedded(self._trained, self._features, rows, evaluating=False)
        return self._say_rows(rows, embeddings, request.number)

    def _evaluated(self, message: Evaluate) -> list[ClientMessage]:
        """Answer with the kept model's embeddings of all rows asked for, or decline."""
        rows, training = message.rows, self._schedule.rows
        if len(rows) and int(rows.min()) < training:
            raise InvalidMessage(
                "VFL-4004",
                f"an evaluation must name held-out rows, from {training} on. Found row {int(rows.min())}, "
                "which is used for training.",
            )
        if message.best >= 0 and self.at_evaluation is not None:
            self.at_evaluation(message.best, restore=message.restore)
        if not self._may_send(rows, "evaluation"):
            return [self._decline(message.number)]
        embeddings = self._embedded(self.model, self._features, rows, evaluating=True)
        return self._say_rows(rows, embeddings, message.number)

    def _may_send(self, rows: Rows, kind: UploadKind) -> bool:
        """Charge the budget for all of these rows; return whether it covers them."""
        return self._budget is None or len(self._budget.spend(rows, kind, whole=True)) == len(rows)

    def _refreshed(self, rows: Rows | None) -> list[ClientMessage]:
        """Refresh these training rows (None: all), except those whose privacy budget is spent."""
        training = self._schedule.rows
        if self._budget is not None:
            rows = self._budget.spend(np.arange(training) if rows is None else rows, "refresh")
            if not len(rows):
                return []
        features = self._features[:training] if rows is None else self._features
        embeddings = self._embedded(self._trained, features, rows, evaluating=False)
        return self._say_rows(np.arange(training) if rows is None else rows, embeddings, None)

    def _say_rows(self, rows: Rows, embeddings: Matrix, request: int | None) -> list[ClientMessage]:
        size = max(1, len(rows)) if request is not None or self.refresh_rows is None else self.refresh_rows
        with made_here():
            return [
                Refresh(self.index, self._next(), part, own, request, len(self._flights))
                for part, own in zip(in_parts(rows, size), in_parts(embeddings, size), strict=True)
            ]
