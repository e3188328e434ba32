"""The server: a state machine that stores embeddings, steps the head and answers with gradients.

The server does no I/O and has no clock. Its caller passes each message to `receive` and sends the replies in
order. The caller also decides when a request has taken too long, and calls `expire`.

A `Turn` is what the server owes for one message: a step of the head, a gradient, or both.

    message                  turn.steps   turn.answers
    Upload(answer=True)      yes          yes            upload-first order
    Upload(answer=False)     yes          no             query-first order
    Query                    no           yes            query-first order

The life of a turn:

    Upload, Query
         |  checks fail: InvalidMessage, nothing changes
         v
    +---------+  Join: the client has lost the upload, or asks its query again
    | WAITING |-----------------------------------------------------------------> dropped
    +---------+  sync: a newer round has begun; reply Skipped
         |
         |  Rule.ready: enough different clients wait
         v
    +---------+  a cell is older than the delay bound D; reply Request    +---------+
    |  GROUP  |---------------------------------------------------------->| BLOCKED |
    |         |<----------------------------------------------------------|         |
    +---------+  Refresh, Decline, Leave, Join or expire: check again     +---------+
         |    |
         |    |  cells stay stale, policy "skip"
         |    +---------------------------------------> reply Skipped
         |  all cells are fresh enough, or policy "use"
         v
    step the head; reply Gradient

WAITING turns are in `_waiting`. The turns of GROUP and BLOCKED are in `_group`, and still in `_waiting`.
With policy "wait" a group stays BLOCKED until the cells are fresh. A group of queries makes no step: the
server only evaluates the gradient.

The life of a client, as the server sees it:

    +---------+  Leave                                       +--------+
    | PRESENT |--------------------------------------------->| ABSENT |
    |         |<---------------------------------------------|        |
    +---------+  Join: reply Welcome, repeat the answers     +--------+
                 that may be lost, request the lost rows

A PRESENT client can also be in `finished` (it uploads no more) and in `overdue` (it let a request expire).
Join clears both. A client is PRESENT at the start: a simulated client does not join.

Invariants:

1. All checks come before the first change: a message that raises InvalidMessage changes nothing.
2. The uploads of a client are taken in order, each once. `activations[m]` is the number of the next one.
3. While a group is BLOCKED no step is made, so no cell ages. Once every client asked has answered, the group
   can go on. So the delay bound cannot block itself.
4. A turn leaves `_waiting` exactly once: in a step, as skipped, or dropped at a join.
5. A Gradient is kept until its client shows that it applied it. After a reconnect the server sends the kept
   object, so it neither steps a second time nor draws fresh noise for the same labels.
6. `table.stored_at` holds the iteration whose model made the embedding. It is not the iteration of arrival,
   so gradients that the client had not applied yet count as delay.
7. `iteration` grows by one with each step of the head, and never passes `last_iteration`.
8. Each client has at most `LARGEST_WINDOW` uploads and one query in `_waiting`. This bounds the memory that a
   client can occupy.

Under a secure sum, the server holds a `TrainingSums` (secure_sum/training.py), and a `SumTable` instead of a
table of embeddings. A `MaskedUpload` has a turn like an `Upload`. The server asks all clients at once for the
sum of an evaluation, and makes no other requests.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from vafl.arrays import Floats, Labels, RowIds
from vafl.errors import InvalidMessage
from vafl.protocol.answers import Answers
from vafl.protocol.bound import DelayBound
from vafl.protocol.descent import Descent
from vafl.protocol.head_step import HeadStep, Loss, Mask
from vafl.protocol.lead import Lead
from vafl.protocol.marks import MarkMemory, Marks
from vafl.protocol.messages import (
    ClientMessage,
    Decline,
    Durable,
    Finished,
    Gradient,
    Join,
    Leave,
    LedgerMark,
    MaskedRefresh,
    MaskingMessage,
    Offer,
    Query,
    Refresh,
    Rekey,
    ServerMessage,
    Skipped,
    Upload,
    Welcome,
    made_here,
    require_growth,
)
from vafl.protocol.requests import Asked, Part, Poll, Requests
from vafl.protocol.rows import NO_ROWS, in_parts
from vafl.protocol.rules import Rule, Turn
from vafl.protocol.secure_sum.training import TrainingSums
from vafl.protocol.settings import LARGEST_COUNT, LARGEST_WINDOW
from vafl.protocol.staleness import DelayLog
from vafl.protocol.table import FOREVER, EmbeddingTable

# With up to this many clients the delay of every used cell is counted. With more, and without a delay bound,
# only those of some rows are, so that a step takes as long for 40 clients as for 4.
_COUNTED_CLIENTS = 8
_FRUITLESS = 2  # after this many epochs of all clients without a step, the run counts as fruitless
RECALL_ROWS = 65_536  # rows in one request for lost embeddings


class Server:
    """Holds the labels, the head theta_0 and the embedding table. Knows the clients only by their messages.

    Args:
        table: the last embedding of every row and client.
        labels: [training rows], one label per row. Later rows of the table are held out: no step uses them.
        head, loss, descent, mask, weights: as in `HeadStep`.
        rule: chooses the uploads of the next step.
        bound: the delay bound, or None.
        marks: remembers the marks of the clients' ledgers. The default keeps them in memory only.
        sums: the keys and words of a secure sum, whose table is a `SumTable`. None takes plain embeddings.
        lead: limits how far fast clients may run ahead; None sets no limit.

    Attributes:
        iteration: the global counter k, which is the number of steps made.
        last_iteration: the number of steps after which the server makes no more.
        activations: how many uploads of each client the server has taken.
        durable: how many uploads of each client the last checkpoint holds.
        absent: the clients that have left.
        finished: the clients that make no more uploads.
        overdue: the clients that let a request expire. The server asks them again once they answer or join.
        requests: the requests to clients that are not answered yet.
        recall_rows: the largest number of lost rows in one request, so that the answer fits into one message.
        run: the random number that identifies the run. Clients keep it with their models.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        labels: Labels,
        head: nn.Module,
        loss: Loss,
        descent: Descent,
        rule: Rule,
        bound: DelayBound | None = None,
        mask: Mask | None = None,
        weights: Floats | None = None,
        *,
        marks: MarkMemory | None = None,
        run: int = 0,
        last_iteration: int = FOREVER,
        recall_rows: int = RECALL_ROWS,
        sums: TrainingSums | None = None,
        lead: Lead | None = None,
    ) -> None:
        self.table, self.head, self.rule, self.bound = table, head, rule, bound
        self.descent, self.sums, self._lead = descent, sums, lead
        every = 1 if bound else max(1, table.clients // _COUNTED_CLIENTS)
        self.delays = DelayLog(table.clients, bound.limit if bound else None, every)
        self.iteration = 0
        self.last_iteration = last_iteration
        self.activations = [0] * table.clients
        self.durable = [0] * table.clients
        self.absent: set[int] = set()
        self.finished: set[int] = set()
        self._refreshed: dict[int, tuple[int, tuple[int, ...]]] = {}  # not acknowledged yet, see `Gradient`
        self.overdue: set[int] = set()
        self.requests = Requests()
        self.recall_rows, self.run = recall_rows, run
        self._met: set[int] = set()
        self._forgettable = 0  # uploads of one client that a crash can have lost; see `restore`
        self._evaluate = HeadStep(labels, descent.trains(head), loss, descent, mask, weights)
        self.losses = self._evaluate.losses
        self._training_rows = len(labels)
        self._sequences = [-1] * table.clients
        self._waiting: list[Turn] = []
        self._group: list[Turn] = []
        self._answers = Answers(table.clients)
        self._marks = marks or Marks()

    # numpy would warn about overflows. The checks of the loss and of the gradients detect them.
    @np.errstate(all="ignore")
    def receive(self, message: ClientMessage) -> list[ServerMessage]:
        """Handle one message; return the replies, in the order to send them.

        Raises:
            InvalidMessage: the message broke a rule. The state of the server has not changed.
            Diverged: the loss or its gradient is not finite.
        """
        if not 0 <= message.client < self.table.clients:
            raise InvalidMessage(
                "VFL-4171", f"client must be in 0..{self.table.clients - 1}. Found {message.client}."
            )
        if message.client in self.absent and not isinstance(message, Join | Leave):
            raise InvalidMessage(
                "VFL-4172",
                f"client {message.client} has left and must join first. Found {type(message).__name__}.",
            )
        return self._take(message) + self._advance()

    @property
    def may_stand_in(self) -> bool:
        """Return whether an evaluation can use default embeddings for a client that does not answer."""
        return self.sums is None

    @property
    def may_poll(self) -> bool:
        """Return whether `poll` may be called now. A sum needs the keys of all clients."""
        return self.sums is None or not self.sums.key_epochs.missing

    def poll(self, rows: RowIds, best: int = -1, *, restore: bool = False) -> Poll:
        """Ask every client that is here and answers for embeddings of held-out rows.

        `best` and `restore` are as in `Evaluate`.
        """
        if self.sums is not None:
            return self.sums.poll(rows, best, restore=restore)
        silent = self.absent | self.overdue
        present = [client for client in range(self.table.clients) if client not in silent]
        return self.requests.poll(present, rows, best, restore=restore)

    @property
    def open_requests(self) -> Set[int]:
        """Return the numbers of the requests that are open."""
        return self.requests.open.keys() if self.sums is None else self.sums.open_requests

    def expire(self, numbers: Iterable[int]) -> list[ServerMessage]:
        """Stop waiting for these requests; return the replies of the steps that this unblocks.

        The caller keeps the clock. For a step that waits for such a request, the delay bound follows its
        policy; under `wait` its requests do not expire. A late answer is still stored, and makes its client
        eligible for requests again. A secure sum gives up its evaluation, and ignores late words.
        """
        if self.sums is not None:
            self.sums.expire(numbers)
            return []
        for number in numbers:
            request = self.requests.open[number]
            if self.bound is not None:
                if self.bound.waits_for(request.client, number):
                    continue
                self.bound.note_answer(request.client, number, declined=True)
            self.requests.expire(request)
            self.overdue.add(request.client)
        return self._advance()

    def end_steps(self) -> None:
        """Make no further step, because the run ends. Uploads are still taken."""
        self.last_iteration = self.iteration

    def restore(
        self, iteration: int, activations: Sequence[int], optimiser: dict[str, Any], *, forgettable: int
    ) -> None:
        """Go back to a checkpoint. The caller restores the head.

        Cells stored after the checkpoint count as lost until their clients join and upload them again.

        Args:
            forgettable: how many uploads of one client the server can have taken after this checkpoint. A
                client that joins may be ahead of the checkpoint by at most this many.
        """
        self.iteration = iteration
        # Older versions did not bound what a client may claim in Join, so a checkpoint can hold a count that
        # no run reaches. Replace such a count by the iteration: the server has stepped on at most that many
        # uploads of one client.
        counts = [count if count <= LARGEST_COUNT // 2 else iteration for count in activations]
        self.activations, self.durable = counts, list(counts)
        self._forgettable = forgettable
        self.descent.restore(optimiser)
        self.table.lose_since(iteration)

    def is_under_way(self, client: int) -> bool:
        """Return whether this client has uploaded anything in this run."""
        return self.activations[client] > 0

    def uploads_done(self) -> list[int]:
        """Return how many uploads of each client a checkpoint may count: those before the first that waits.

        A crash loses the turns that wait, so their clients must upload them again.
        """
        counts = list(self.activations)
        for turn in self._waiting:
            if turn.steps:
                counts[turn.client] = min(counts[turn.client], turn.activation)
        return counts

    def made_durable(self, activations: Sequence[int]) -> list[Durable]:
        """Note how many uploads of each client a checkpoint holds; return the news for the clients."""
        grown = [client for client, count in enumerate(activations) if count > self.durable[client]]
        self.durable = list(activations)
        return [Durable(client, activations[client]) for client in grown]

    @property
    def over(self) -> bool:
        """Return whether no further step is possible, because clients have finished or declined."""
        hopeless = self.bound is not None and self.bound.hopeless
        # With all clients present, uploads are skipped because clients decline requests or let them expire.
        declined = self.fruitless and not self.absent
        return hopeless or declined or self.table.clients - len(self.finished) < self.rule.quorum

    @property
    def fruitless(self) -> bool:
        """Return whether the server has skipped every upload for two epochs: only a join can change that."""
        return self.bound is not None and self.bound.skipped_rows >= _FRUITLESS * self.table.stored_at.size

    def owes_reply(self, client: int) -> bool:
        """Return whether a turn of this client waits. The client may send nothing until it is answered."""
        return any(turn.client == client for turn in self._waiting)

    def waiting_for(self, names: Sequence[str] = ()) -> str:
        """Describe what the server is waiting for, for logs and error messages.

        Args:
            names: the names of the clients. Without them, the text has the clients' numbers.
        """
        who, gone = "" if names else "clients ", listed(self.absent, names)
        if self.sums is not None and (missing := self.sums.key_epochs.missing):
            epoch = self.sums.key_epochs.number
            return f"keys of {who}{listed(missing, names)} for epoch {epoch} of masks; gone: {gone}"
        if self.bound and self._group:
            rows = np.concatenate([turn.rows for turn in self._group])
            lacking = self.bound.stale(self.table, rows, self.iteration).keys() | self.bound.asked.keys()
            return f"fresh embeddings from {who}{listed(lacking, names)} (delay bound); gone: {gone}"
        if self.bound and self.bound.skipped_rows:
            return (
                f"fresh embeddings from {who}{listed(self.bound.lacking, names)}: every upload since "
                f"iteration {self.iteration} was skipped because they are missing (delay bound); gone: {gone}"
            )
        here = listed({turn.client for turn in self._waiting}, names)
        if self._lead is not None and self._waiting and self.rule.quorum == 1:
            return f"uploads of slower clients: those of {here} are too far ahead (rule.lead); gone: {gone}"
        return f"uploads of {self.rule.quorum} different clients; it has those of {here}; gone: {gone}"

    # --- one method per kind of message: all checks come before the first change ---

    def _take(self, message: ClientMessage) -> list[ServerMessage]:
        if self.sums is not None and isinstance(message, Upload | Refresh | Query):
            raise InvalidMessage(
                "VFL-4161",
                f"this run has a secure sum, so embeddings must be masked. Found {type(message).__name__} of "
                f"client {message.client}. Set privacy.secure_sum to the same value at all parties.",
            )
        if isinstance(message, Upload):
            replies = self._take_upload(message)
        elif isinstance(message, Refresh):
            replies = self._take_refresh(message)
        elif isinstance(message, Query):
            replies = self._take_query(message)
        elif isinstance(message, Decline):
            replies = self._take_decline(message)
        elif isinstance(message, Finished):
            replies = self._take_finished(message)
        elif isinstance(message, LedgerMark):
            replies = self._take_mark(message)
        elif isinstance(message, Leave):
            replies = self._take_leave(message)
        elif isinstance(message, Join):
            self._check_join(message)
            replies = self._take_join(message)
        elif self.sums is not None:
            replies = self._take_masked(message, self.sums)
        else:
            raise InvalidMessage(
                "VFL-4173",
                f"this run has no secure sum. Found {type(message).__name__} of client {message.client}. "
                "Set privacy.secure_sum to the same value at all parties.",
            )
        return replies

    def _take_upload(self, upload: Upload) -> list[ServerMessage]:
        client = upload.client
        require_growth(client, upload.sequence, self._sequences)
        self.table.check(client, upload.rows, upload.embeddings)
        self._check_turn(client, upload.activation, upload.rows)
        # The checks are done. `_store` looks at the count of uploads before this one.
        self._sequences[client] = upload.sequence
        self._store(upload)
        self.activations[client] += 1
        if not upload.answer:
            self._answers.unasked[client] = upload
        self._waiting.append(Turn(client, upload.activation, upload.rows, True, upload.answer))
        return self._end_older_rounds() if self.rule.common_rows else []

    def _take_refresh(self, refresh: Refresh) -> list[ServerMessage]:
        require_growth(refresh.client, refresh.sequence, self._sequences)
        self.table.check(refresh.client, refresh.rows, refresh.embeddings)
        more: list[ServerMessage] = []
        # `requests.check` is the last check: it raises before `_close_request` changes anything.
        if refresh.request is not None:
            more = self._close_request(self.requests.check(refresh), declined=False)
        else:
            self._refreshed[refresh.client] = refresh.sequence, tuple(self.activations)
        self._sequences[refresh.client] = refresh.sequence
        self._store(refresh)
        return more

    def _take_masked(self, message: MaskingMessage, sums: TrainingSums) -> list[ServerMessage]:
        client = message.client
        replies: list[ServerMessage] = []
        require_growth(client, message.sequence, self._sequences)
        if sums.key_epochs.is_void(message.epoch):
            return []  # The client sent this before it knew of the current epoch.
        if isinstance(message, Offer):
            replies = sums.take_offer(message)
        else:
            sums.key_epochs.require_keys(client)
            self.table.check(0, message.rows, message.words)
            if isinstance(message, MaskedRefresh):
                total = sums.take_answer(message)
                if total is not None:
                    self.table.store(0, message.rows, total, self.iteration)
            else:
                self._check_turn(client, message.activation, message.rows)
                self.activations[client] += 1
                # Sync: a client uploads the next round only after it has applied the last answer.
                self._answers.kept[client].clear()
                sums.keep(message)
                self._waiting.append(Turn(client, message.activation, message.rows, True, True))
                replies = self._end_older_rounds()
        self._sequences[client] = message.sequence
        return replies

    def _take_query(self, query: Query) -> list[ServerMessage]:
        require_growth(query.client, query.sequence, self._sequences)
        asked = any(turn.client == query.client and not turn.steps for turn in self._waiting)
        if asked or query.activation >= self.activations[query.client]:
            raise InvalidMessage(
                "VFL-4174",
                f"client {query.client} has no unanswered upload of activation {query.activation}.",
            )
        self._sequences[query.client] = query.sequence
        upload = self._answers.unasked.get(query.client)
        turn = Turn(query.client, query.activation, NO_ROWS, False, True)
        if upload is None or upload.activation != query.activation:
            # Not a fault: the query crossed an answer that the server repeated at a join, or the server was
            # restored and has lost the upload. Skipped lets the client continue.
            return [self._skipped(turn, "the server no longer has this upload")]
        self._waiting.append(replace(turn, rows=upload.rows))
        return []

    def _take_decline(self, decline: Decline) -> list[ServerMessage]:
        require_growth(decline.client, decline.sequence, self._sequences)
        more: list[ServerMessage] = []
        if self.sums is not None:
            self.sums.take_decline(decline)
        else:
            more = self._close_request(self.requests.check(decline), declined=True)
        self._sequences[decline.client] = decline.sequence
        return more

    def _take_finished(self, finished: Finished) -> list[ServerMessage]:
        require_growth(finished.client, finished.sequence, self._sequences)
        self._sequences[finished.client] = finished.sequence
        self.finished.add(finished.client)
        return []

    def _take_mark(self, message: LedgerMark) -> list[ServerMessage]:
        require_growth(message.client, message.sequence, self._sequences)
        self._sequences[message.client] = message.sequence
        self._marks.remember(message)
        return []

    def _take_leave(self, leave: Leave) -> list[ServerMessage]:
        """Mark the client absent. Its uploads stay valid, and its answers are kept until it joins again."""
        self.absent.add(leave.client)
        self._forget_requests(leave.client)
        return self._end_epoch(leave.client, f"client {leave.client} left")

    def _take_join(self, join: Join) -> list[ServerMessage]:
        """Bring a client and the server back to the same point of the run.

        Either of them may have lost messages, or been restored from a checkpoint. After this method:

        - `Welcome` tells the client which uploads the server has. The client sends the others again.
        - The server repeats the answers that the client has not applied, or skips those that it lost.
        - The server requests the embeddings that it lost, and those made by a model that the client lost.
        """
        client = join.client
        # First take back the open round, so that Welcome has the counts that the clients continue from.
        rekeyed = self._end_epoch(client, f"client {client} joined")
        if self.sums is not None:
            rekeyed = [Rekey(client, self.sums.key_epochs.number, "welcome"), *rekeyed]
        self._met.add(client)
        self.absent.discard(client)
        self.finished.discard(client)
        self._refreshed.pop(client, None)
        if self._lead is not None:
            self._lead.restart(self.activations)
        self._sequences[client] = -1  # sequence numbers restart with each connection
        self._forget_requests(client)
        recalled = self._recall(client, join)
        self._drop_turns(client, join.activation)
        # A restored server may know fewer answered uploads than the client. `_check_join` bounds the claim.
        self.activations[client] = max(self.activations[client], join.applied)
        mark = self._marks.recall(client)
        counts = tuple(self.activations)
        welcome = Welcome(client, self.iteration, counts, self.durable[client], self.run, mark)
        # Only after the counts are final: an upload that the server never got is not owed an answer.
        owed = self._owed(client, range(join.applied, min(join.activation, self.activations[client])))
        return [welcome, *owed, *recalled, *rekeyed]

    def _end_epoch(self, client: int, why: str) -> list[ServerMessage]:
        """Begin a key epoch if this client's leave or join ends the last one; return what to send.

        Take back the uploads of the open round. Their clients send them again in the new epoch.
        """
        rekeyed = None if self.sums is None else self.sums.end_epoch(client, why, self.absent)
        if rekeyed is None:
            return []
        for turn in self._waiting:
            self.activations[turn.client] -= 1
        self._waiting, self._group = [], []
        return [*rekeyed]

    def _owed(self, client: int, flights: range) -> list[ServerMessage]:
        """Return the answers to these uploads that the client may have missed; Skipped for lost ones."""
        waiting = {turn.activation for turn in self._waiting if turn.client == client}
        owed: list[ServerMessage] = []
        for activation, answer in self._answers.owed(client, flights, waiting):
            turn = Turn(client, activation, NO_ROWS, False, True)
            owed.append(answer or self._skipped(turn, "the answer to this upload was lost"))
        return owed

    def _recall(self, client: int, join: Join) -> list[ServerMessage]:
        """Request the client's embeddings that the server lost, and those made by a model the client lost."""
        if join.activation < self.activations[client]:
            # The client was restored from a checkpoint. Its model has lost the steps after `iteration`, so
            # the embeddings stored since then come from a model that no longer exists.
            self.table.lose_since(join.iteration, client)
        lost = self.table.lost(client)
        held_out = lost >= self._training_rows
        parts = [
            Part(rows, held_out=kind)
            for kind, chosen in ((False, lost[~held_out]), (True, lost[held_out]))
            if len(chosen)
            for rows in in_parts(chosen, self.recall_rows)
        ]
        return [*self.requests.make_in_turn(client, parts)]

    def _drop_turns(self, client: int, activation: int) -> None:
        """Drop the client's turns that it no longer waits for: uploads from `activation` on, and queries.

        The client has lost these uploads, and sends its query again when it wakes.
        """
        turns = [turn for turn in self._waiting if turn.client == client]
        dropped = [turn for turn in turns if not turn.steps or turn.activation >= activation]
        self._finish(dropped)
        if self.rule.common_rows:  # The rounds are still open. The client uploads its part again.
            self.activations[client] -= sum(turn.steps for turn in dropped)
        if any(turn in dropped for turn in self._group):
            # The blocked step has lost a member. Let the rule choose the group again.
            self._group = []
            if self.bound:
                self.bound.begin_step()

    def _forget_requests(self, client: int) -> None:
        self.requests.forget(client)
        self.overdue.discard(client)
        if self.bound:
            self.bound.forget(client)

    def _close_request(self, request: Asked, *, declined: bool) -> list[ServerMessage]:
        """Close a request; return the requests to send next."""
        self.overdue.discard(request.client)
        if self.bound:
            self.bound.note_answer(request.client, request.number, declined=declined)
        return [*self.requests.answered(request, declined=declined)]

    def _store(self, message: Upload | Refresh) -> None:
        """Store embeddings under the iteration whose model made them.

        This is the current iteration if the client has applied all its answers. Otherwise it is the iteration
        of the first answer that was missing from the model, so the missing steps count as delay.
        """
        client = message.client
        unapplied = self._answers.first_unapplied(client, self.activations[client] - message.in_flight)
        iteration = unapplied.iteration if unapplied else self.iteration
        self.table.store(client, message.rows, message.embeddings, iteration)

    def _check_join(self, join: Join) -> None:
        """Raise InvalidMessage if the client claims more answered uploads than the run can have reached.

        A restored server has lost the uploads that it took after its checkpoint. It accepts a larger count at
        the client's first join since then, and only by as many uploads as fit between two checkpoints. From
        then on it knows every upload that was answered. All other clients look ahead from this count, so a
        client that could claim any count would control which rows they upload.
        """
        known = self.activations[join.client]
        known += 0 if join.client in self._met else self._forgettable
        if join.applied > known:
            raise InvalidMessage(
                "VFL-4175",
                f"at most {known} uploads of client {join.client} can have been answered. Found "
                f"{join.applied}. Resume the client from its state of this run, or start it without a state.",
            )
        if join.activation - join.applied > LARGEST_WINDOW:
            raise InvalidMessage(
                "VFL-4176",
                f"a client may have {LARGEST_WINDOW} uploads in flight. "
                f"Found {join.activation - join.applied} of client {join.client}. It must wait for answers.",
            )

    def _check_turn(self, client: int, activation: int, rows: RowIds) -> None:
        """Raise InvalidMessage unless this is the client's next upload, of rows the server may step on."""
        if activation != self.activations[client]:
            raise InvalidMessage(
                "VFL-4177",
                f"the next upload of client {client} must be activation {self.activations[client]}. "
                f"Found {activation}.",
            )
        # The first comparison is cheap and almost always decides.
        many = len(self._waiting) >= LARGEST_WINDOW
        if many and sum(turn.client == client for turn in self._waiting) >= LARGEST_WINDOW:
            raise InvalidMessage(
                "VFL-4178",
                f"a client may have {LARGEST_WINDOW} uploads in flight. Found one more of client {client}. "
                "It must wait for answers.",
            )
        if self.table.rows > self._training_rows and int(rows.max()) >= self._training_rows:
            raise InvalidMessage(
                "VFL-4179",
                f"rows of an upload must be training rows, below {self._training_rows}. "
                f"Found {int(rows.max())}, a held-out row.",
            )
        for turn in self._waiting if self.rule.common_rows else ():
            if turn.activation == activation and not np.array_equal(turn.rows, rows):
                raise InvalidMessage(
                    "VFL-4180",
                    f"the sync rule needs one common minibatch. Client {client} uploaded other "
                    f"rows than client {turn.client}. Give all parties the same seed.",
                )

    def _end_older_rounds(self) -> list[ServerMessage]:
        """Skip the turns of older sync rounds.

        After a crash, clients can be in different rounds. A client never goes back to an earlier round, so
        only the newest round can still become complete.
        """
        newest = max(turn.activation for turn in self._waiting)
        older = [turn for turn in self._waiting if turn.steps and turn.activation < newest]
        self._finish(older)
        return [self._skipped(turn, "other clients are in a later round") for turn in older if turn.answers]

    # --- deciding and stepping ---

    def _advance(self) -> list[ServerMessage]:
        """Make every step that the rule and the delay bound allow now; return the replies."""
        replies: list[ServerMessage] = []
        while self._waiting and self.iteration < self.last_iteration:
            # A blocked group keeps its members: uploads that arrive later must not change the rows for which
            # fresh cells were requested.
            self._group = self._group or self._ready()
            if not self._group:
                return replies
            if self.bound and self._must_wait(self.bound, replies):
                return replies
            if self._group:  # empty if its turns were skipped
                group, self._group = self._group, []
                self._finish(group)
                replies += self._step(group)
        return replies

    def _ready(self) -> list[Turn]:
        """Return the turns of the next step; empty if there are too few."""
        if self._lead is None:
            return self.rule.ready(self._waiting)
        away = self.absent | self.finished | self.overdue
        within = self._lead.within(self._waiting, self.activations, away)
        # A step of several clients must not wait for a client that itself waits for this step.
        return self.rule.ready(within) or (self.rule.ready(self._waiting) if within else [])

    def _must_wait(self, bound: DelayBound, replies: list[ServerMessage]) -> bool:
        """Return whether the group must wait for fresh cells; add requests and skipped turns to `replies`."""
        rows = np.concatenate([turn.rows for turn in self._group])
        stale = bound.stale(self.table, rows, self.iteration)
        # Policy "wait" needs every answer, however late, so it also asks clients that let a request expire.
        silent = self.absent if bound.policy == "wait" else self.absent | self.overdue
        replies += bound.ask(stale, silent, self.requests)
        if bound.must_wait(stale):
            return True
        bound.begin_step()
        skipped = bound.to_skip(self._group, stale)
        bound.note_skipped(skipped, stale)
        if skipped:
            self._finish(skipped)
            self._group = []
            reason = f"no fresh embeddings from clients {sorted(stale)} within delay bound {bound.limit}"
            replies += [self._skipped(turn, reason) for turn in skipped if turn.answers]
        return False

    def _finish(self, turns: Sequence[Turn]) -> None:
        """Remove these turns from those that wait."""
        self._waiting = [turn for turn in self._waiting if turn not in turns]

    def _skipped(self, turn: Turn, reason: str) -> Skipped:
        self._answers.close(turn.client, turn.activation)
        return Skipped(turn.client, turn.activation, self.iteration, tuple(self.activations), reason)

    def _step(self, group: Sequence[Turn]) -> list[ServerMessage]:
        """Evaluate the loss once for all turns, step the head by their mean gradient, return the answers."""
        shared, iteration = self.rule.common_rows, self.iteration
        if self.sums is not None:
            self.table.store(0, group[0].rows, self.sums.sum_round(), iteration)
        for turn in group[:1] if shared else group:
            self.delays.record(self.table, turn.rows, iteration, None if shared else turn.client)
        parts = self._evaluate(self.table, group, iteration, shared=shared)
        self.iteration += group[0].steps
        counts = tuple(self.activations)
        with made_here():
            answers = [
                Gradient(
                    turn.client,
                    turn.activation,
                    iteration,
                    part,
                    counts,
                    *self._refreshed.pop(turn.client, ()),
                )
                for turn, part in zip(group, parts, strict=True)
                if turn.answers
            ]
        for answer in answers:
            self._answers.add(answer)
        return list(answers)


def listed(clients: Iterable[int], names: Sequence[str]) -> str:
    """Return the clients' names, or their numbers if there are no names."""
    numbers = sorted(clients)
    return ", ".join(names[client] for client in numbers) or "none" if names else str(numbers)
