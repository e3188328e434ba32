"""The training client: a state machine that uploads embeddings and steps its model on the gradients.

The client does no I/O and has no clock. Its caller (the simulator or the network runtime) calls three methods
and sends the messages that they return, in order:

    join()            on every new connection: return the `Join` to send first
    wake()            begin an activation; allowed only while not `waiting`
    receive(message)  handle one message from the server

The client is in one of these states. "In flight" means uploaded and not answered yet.

    READY      fewer than `window` answers are owed: the caller may call wake()
    WAITING    `window` answers are owed: only a message from the server changes the state
    JOINING    Join is sent and Welcome has not arrived: the caller does not call wake()
    FINISHED   no more uploads; the client still applies answers and answers requests

Upload-first order, which is Algorithm 1 as written, with window = 1:

                       wake(): send Upload
           +-------------------------------------------+
           |                                           v
      +---------+                                 +---------+
      |  READY  |                                 | WAITING |
      +---------+                                 +---------+
           ^                                           |
           |  Gradient: step theta_m, send Refresh     |
           |  Skipped: no step, send Refresh           |
           +-------------------------------------------+

With window = w the client stays READY until w uploads are in flight. The refresh policy chooses the rows of
Refresh; if it chooses none, the client sends no Refresh.

Query-first order, which is the footnote of Algorithm 1. Its window is 1:

    +-------------+                       +-------------+    wake(): send Query      +-------------+
    |    READY    |  wake(): send Upload  |    READY    |--------------------------->|   WAITING   |
    | 0 in flight |---------------------->| 1 in flight |<---------------------------| 1 in flight |
    +-------------+                       +-------------+  Gradient: step theta_m,   +-------------+
                                                           Skipped: no step;
                                                           then send Upload, Refresh

Here the uploads have `answer=False`: the server steps on them, and sends the gradient when it gets the query.

Transitions from every state, in both orders:

    join(): send Join             -> JOINING
    JOINING, Welcome              -> READY or WAITING; send the uploads that the server does not have.
                                     If the server has uploads that this client does not know, the client was
                                     restored from an older checkpoint: it drops its own uploads in flight and
                                     continues from the server's count.
    wake(), no budget left        -> FINISHED; send Finished
    Request(rows)                 -> same state; send Refresh with these rows, or Decline
    Gradient or Skipped, repeated -> same state; ignored

Invariants:

1. Uploads have the numbers 0, 1, 2, ... without gaps. `activation` is the number of the next upload. The
   server answers uploads in order, so the uploads in flight are `applied`, ..., `activation` - 1.
2. Each answer is applied at most once. The client removes the upload from `_flights` before it steps. It
   ignores answers to uploads below `applied`, which a server repeats after a reconnect.
3. A message that raises InvalidMessage changes nothing: all checks come before the first change.
4. A retry sends the bytes of the first attempt. `Flight` keeps the embeddings, so the client neither draws
   fresh noise nor charges the privacy budget again.
5. The client charges the budget, durably, before embeddings leave. A crash in between wastes budget and leaks
   nothing.
6. A gradient is pulled back through the parameters that the client has now. `_version` counts changes of the
   parameters. If it has changed since the upload, the client embeds the batch again for the backward pass.
7. Sequence numbers grow within one connection and restart with join().
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from vafl import kernels
from vafl.arrays import Matrix, RowIds
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
    Keys,
    Query,
    Request,
    ServerMessage,
    Skipped,
    Welcome,
)
from vafl.protocol.prediction_client import Budget, Perturb, PredictionClient, UploadKind
from vafl.protocol.refresh import RefreshPolicy
from vafl.protocol.rows import in_parts
from vafl.protocol.schedule import BatchSchedule
from vafl.protocol.sender import Sender
from vafl.protocol.settings import RuleSettings


class AtEvaluation(Protocol):
    """Save the model before the client answers an evaluation, or restore the best model.

    `best` and `restore` are as in `Evaluate`.
    """

    def __call__(self, client: "Client", best: int, *, restore: bool) -> None: ...


@dataclass(slots=True)
class Flight:
    """An upload that the server has not answered yet.

    Attributes:
        rows: [batch], the rows of the minibatch.
        embeddings: [batch, width], as uploaded: clipped and noised if the client is private.
        pull_back: maps the gradient w.r.t. the embeddings to the gradients of theta_m. It may be valid only
            for the parameters it was made with.
        version: the client's `_version` when `pull_back` was made.
        behind: how many uploads were already in flight at that time.
        latest: the last server iteration that the client knew of at that time.
    """

    rows: RowIds
    embeddings: Matrix
    pull_back: PullBack
    version: int
    behind: int
    latest: int


@dataclass(slots=True)
class Staleness:
    """Statistics of how stale this client's uploads were when the server used them.

    The delay of an upload is the number of server steps between two steps: the last one that the client knew
    of when it made the upload, and the one that used the upload.

    Attributes:
        answers: how many uploads were counted.
        total: the sum of their delays.
        largest: the longest delay.
    """

    answers: int = 0
    total: int = 0
    largest: int = 0

    def note(self, delay: int) -> None:
        """Count one upload with this delay, in server iterations."""
        self.answers, self.total = self.answers + 1, self.total + delay
        self.largest = max(self.largest, delay)

    @property
    def mean(self) -> float:
        return self.total / max(1, self.answers)


class Client(PredictionClient):
    """Holds the features and the embedding model theta_m of one party.

    Args:
        index: the number of this client, which is its column in the server's table.
        features: [rows, ...], the party's features, one row per record. The training rows, which the schedule
            draws from, come first. The held-out rows follow; the client sends them only on request.
        model: maps features to embeddings [batch, width]. The client evaluates with it and keeps it at the
            end of the run.
        descent: steps the model's parameters.
        schedule: the minibatch of each activation.
        refresh: chooses the other rows to upload at the end of an activation.
        rule: the order of Algorithm 1, the window, the number of local steps, and the start.
        l2: coefficient of the regulariser l2/2 |theta_m|^2.
        embed_batch: embeds a batch (features, rows) and returns the pull-back to the parameters' gradients.
            None uses plain differentiation.
        perturb: turns the model's outputs into the embeddings that are sent, for example by clipping and
            noise. None sends the outputs.
        budget: limits the uploads of each record. None sets no limit.
        refresh_rows: the largest number of rows in one `Refresh` that the client sends unasked. None sends
            all rows in one message.
        at_evaluation: called before the client answers an `Evaluate` of a run that ends with its best models.
        sender: makes the messages with embeddings. None sends them without masks.

    Attributes:
        activation: the number of the next upload.
        iteration: the last server iteration that the model has stepped on; -1 if none.
        finished: the reason why the client makes no more uploads; empty while it makes them.
        run: the random number that identifies the run, from the last `Welcome`.
        latest: the last server iteration that the client was told; -1 if none.
        staleness: delays of the uploads since the process started.
        gradient_limit: scales down gradients that are far larger than usual, and counts them.
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
        refresh_rows: int | None = None,
        at_evaluation: AtEvaluation | None = None,
        sender: Sender | None = None,
    ) -> None:
        super().__init__(index, features, model, perturb=perturb, budget=budget, sender=sender)
        self.activation = 0
        self.iteration = self.latest = -1
        self.run = 0
        self._refresh_rows, self._at_evaluation = refresh_rows, at_evaluation
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
        """Return how many answers the server owes: gradients of uploads, or of one query."""
        return int(self._queried >= 0) if self._rule.order == "query-first" else len(self._flights)

    @property
    def waiting(self) -> bool:
        """Return whether the client cannot begin an activation: the window is full, or it has finished."""
        return self.owed >= (self._rule.window or 1) or bool(self.finished)

    @property
    def server_fault(self) -> str:
        """Describe the gradients that were scaled down; empty if there were none."""
        limit = self.gradient_limit
        if not limit.scaled:
            return ""
        norms = f"norm up to {limit.largest:.3g}; the usual norm is {limit.usual:.3g}"
        return f"{limit.scaled} gradients of {norms}"

    def join(self) -> Join:
        """Start a new connection; return the `Join` that tells the server where this client stands."""
        self.sender.restart()
        self._refresh.restart()
        return Join(self.index, self.activation, self.applied, self.iteration)

    @property
    def applied(self) -> int:
        """Return how many uploads were answered, which is the number of the oldest upload in flight."""
        return min(self._flights, default=self.activation)

    def restore(self, activation: int, iteration: int, optimiser: dict[str, Any], *, run: int = 0) -> None:
        """Go back to a checkpoint of this run. The caller restores the model's parameters."""
        self.activation, self.iteration, self.run = activation, iteration, run
        self.descent.restore(optimiser)

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Replace the parameters of the model."""
        self.model.load_state_dict(parameters)
        # The pull-backs in flight belong to the old parameters. A new version makes `_apply` embed again.
        self._version += 1

    @np.errstate(all="ignore")  # as in `receive`
    def wake(self) -> list[ClientMessage]:
        """Begin an activation; return the messages to send. Call it only while not `waiting`."""
        if self._rule.order == "query-first" and self._flights:
            self._queried = next(iter(self._flights))
            return self._with_mark([Query(self.index, self.sender.number(), self._queried)])
        messages = self.sender.begin()
        if self._rule.start == "upload" and self.activation == 0:
            messages += self._refreshed(None)
        return self._with_mark([*messages, *self._upload()])

    def _take(self, message: ServerMessage) -> list[ClientMessage]:
        if isinstance(message, Welcome):
            # Check the ledger first: a client with an outdated ledger must stop before it sends anything.
            super()._take(message)
            return self._rejoin(message)
        if isinstance(message, Keys) and self.sender.summed:
            # Everything in flight was masked in an earlier epoch, or waits for its first masks.
            return [*self.sender.rekey(message), *self._uploads_of(self._flights)]
        if isinstance(message, Evaluate):
            return self._evaluated(message) if self.sender.ready else []
        if not isinstance(message, (Gradient, Skipped)):
            return super()._take(message)
        if message.activation < self.applied:
            return []  # The server repeats answers that a broken connection may have lost. This one arrived.
        self._check_answer(message)
        flight = self._flights.pop(message.activation)
        # A Gradient names the step it belongs to. A Skipped has the number of steps made so far, so the last
        # step is one less.
        self.latest = message.iteration - isinstance(message, Skipped)
        self._queried = -1
        if isinstance(message, Gradient):
            if message.stored:
                self._refresh.stored(message.refreshed, message.stored)
            self.staleness.note(max(0, message.iteration - flight.latest - 1))
            self._apply(flight, message)
        return self._end_activation(message.activations)

    def _check_answer(self, answer: Gradient | Skipped) -> None:
        flight = self._flights.get(answer.activation)
        if flight is None:
            raise InvalidMessage(
                "VFL-4001",
                f"the server may only answer uploads in flight. Found an answer to activation "
                f"{answer.activation}, which is not in flight.",
            )
        if isinstance(answer, Gradient) and answer.gradients.shape != flight.embeddings.shape:
            raise InvalidMessage(
                "VFL-4002",
                f"gradients of activation {answer.activation} must have the shape of its embeddings, "
                f"{list(flight.embeddings.shape)}. Found {list(answer.gradients.shape)}.",
            )

    def _rejoin(self, welcome: Welcome) -> list[ClientMessage]:
        """Send again the uploads that the server does not have, and `Finished` if it applies.

        If the server is ahead, continue from its count.
        """
        received = welcome.activations[self.index]
        self._queried = -1  # The server forgets queries at a join. The next wake() sends the query again.
        self.run, self.latest = welcome.run, welcome.iteration - 1
        # A server that was restored from a checkpoint counts the iterations since then a second time. With
        # the larger number in a later Join, the server would trust cells that it has to ask for again.
        self.iteration = min(self.iteration, welcome.iteration)
        if received > self.activation:
            # This client was restored from a checkpoint older than its last uploads. The server has them, and
            # would refuse their numbers a second time.
            self._flights.clear()
            self.activation = received
        missing = [activation for activation in self._flights if activation >= received]
        messages = self._uploads_of(missing)
        return [*messages, self._finish(self.finished)] if self.finished else messages

    def _upload(self) -> list[ClientMessage]:
        """Embed the next minibatch and put it in flight; finish if the budget allows none of its rows."""
        rows = self._schedule.batch(self.activation)
        if self._budget is not None:
            # Under sync all clients upload the same rows, so one client cannot leave some of them out.
            rows = self._budget.spend(rows, "batch", whole=self._rule.name == "sync")
            if not len(rows):
                reason = f"the privacy budget of the rows of activation {self.activation} is spent"
                return [self._finish(reason)]
        behind = len(self._flights)
        flight = Flight(rows, *self._embed_batch(rows), self._version, behind, self.latest)
        self._flights[self.activation] = flight
        self.activation += 1
        return self._uploads_of([self.activation - 1])

    def _finish(self, reason: str) -> Finished:
        self.finished = reason
        return Finished(self.index, self.sender.number(), reason)

    def _uploads_of(self, activations: Iterable[int]) -> list[ClientMessage]:
        """Return the messages for uploads in flight. A retry has the embeddings of the first attempt."""
        answer, messages = self._rule.order == "upload-first", []
        for activation in activations:
            flight = self._flights[activation]
            messages += self.sender.upload(
                activation, flight.rows, flight.embeddings, answer=answer, in_flight=flight.behind
            )
        return messages

    def _embed_batch(self, rows: RowIds) -> tuple[Matrix, PullBack]:
        embedded = self._embed(kernels.gather(self._inputs, rows), rows)
        return embedded if self._perturb is None else followed_by(self._perturb, embedded)

    def _apply(self, flight: Flight, answer: Gradient) -> None:
        """Step Q times on one answer: theta_m <- theta_m - eta (grad h * gradient + grad r)."""
        if not self.descent.parameters:  # the embedding is fixed
            return
        gradients = self.gradient_limit(answer.gradients)
        for _ in range(self._rule.local_steps):
            # theta_m has changed since the upload if another answer was applied, or after the first local
            # step. Then embed the batch again for a pull-back through the parameters of now. Only its
            # backward pass is used: no embedding leaves the client, so nothing is charged.
            current = flight.version == self._version or not ages(flight.pull_back)
            pull_back = flight.pull_back if current else self._embed_batch(flight.rows)[1]
            self.descent.step(pull_back(gradients), answer.iteration, l2=self._l2)
            self._version += 1
            self.iteration = answer.iteration

    def _end_activation(self, activations: Sequence[int]) -> list[ClientMessage]:
        """Return what the client sends after an answer: its next upload (query-first order) and a refresh."""
        messages = self._upload() if self._rule.order == "query-first" else []
        rows = self._refresh.rows(activations)
        if rows is None or len(rows):
            with self._refresh.time.refreshing(self._schedule.rows if rows is None else len(rows)):
                refreshes = self._refreshed(rows)
            if refreshes:
                self._refresh.sent(self.sender.sequence)
            messages += refreshes
        return messages

    def _answer(self, request: Request) -> list[ClientMessage]:
        """Answer with the training model's embeddings of all rows asked for, or decline."""
        rows, training = request.rows, self._schedule.rows
        if self.sender.summed:
            raise InvalidMessage(
                "VFL-4112",
                f"only held-out rows, from {self._schedule.rows} on, are summed outside rounds, when the "
                f"server evaluates. Found request {request.number}, which is for training rows.",
            )
        if len(rows) and int(rows.max()) >= training:
            raise InvalidMessage(
                "VFL-4003",
                f"a request must name training rows, below {training}. Found row {int(rows.max())}, which is "
                "held out.",
            )
        if not self._may_send(rows, "request"):
            return [self._decline(request.number)]
        embeddings = self._embedded(self._trained, self._features, rows, evaluating=False)
        return self.sender.refresh(rows, embeddings, request.number, in_flight=len(self._flights))

    def _evaluated(self, message: Evaluate) -> list[ClientMessage]:
        """Answer with the kept model's embeddings of all rows asked for, or decline."""
        rows, training = message.rows, self._schedule.rows
        self._check_rows(rows)
        if len(rows) and int(rows.min()) < training:
            raise InvalidMessage(
                "VFL-4004",
                f"an evaluation must name held-out rows, from {training} on. Found row {int(rows.min())}, "
                "which is used for training.",
            )
        if message.best >= 0 and self._at_evaluation is not None:
            self._at_evaluation(self, message.best, restore=message.restore)
        if not self._may_send(rows, "evaluation"):
            return [self._decline(message.number)]
        embeddings = self._embedded(self.model, self._features, rows, evaluating=True)
        return self.sender.refresh(rows, embeddings, message.number, in_flight=len(self._flights))

    def _may_send(self, rows: RowIds, kind: UploadKind) -> bool:
        """Charge the budget for all of these rows; return whether it covers them."""
        return self._budget is None or len(self._budget.spend(rows, kind, whole=True)) == len(rows)

    def _refreshed(self, rows: RowIds | None) -> list[ClientMessage]:
        """Refresh these training rows (None: all), except those whose privacy budget is spent."""
        training = self._schedule.rows
        if self._budget is not None:
            rows = self._budget.spend(np.arange(training) if rows is None else rows, "refresh")
            if not len(rows):
                return []
        features = self._features[:training] if rows is None else self._features
        embeddings = self._embedded(self._trained, features, rows, evaluating=False)
        rows = np.arange(training) if rows is None else rows
        size = self._refresh_rows or len(rows)
        messages: list[ClientMessage] = []
        for rows_part, part in zip(in_parts(rows, size), in_parts(embeddings, size), strict=True):
            messages += self.sender.refresh(rows_part, part, None, in_flight=len(self._flights))
        return messages
