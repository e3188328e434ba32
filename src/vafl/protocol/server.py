"""The server: stores embeddings, decides by its rule, steps the head, answers gradients.

The whole life of an upload is here: `receive` -> checked -> stored -> the rule decides -> the delay
bound may ask for fresh cells -> one evaluation of the loss -> the head steps, gradients go back.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from vafl.errors import InvalidMessage
from vafl.protocol.answers import Answers
from vafl.protocol.bound import DelayBound
from vafl.protocol.descent import Descent
from vafl.protocol.head_step import HeadStep, Loss, Mask
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
    Query,
    Refresh,
    ServerMessage,
    Skipped,
    Upload,
    Welcome,
    made_here,
    require_growth,
)
from vafl.protocol.requests import Asked, Part, Poll, Requests
from vafl.protocol.rows import NO_ROWS, Array, Matrix, Rows, in_parts
from vafl.protocol.rules import Rule, Turn
from vafl.protocol.settings import LARGEST_COUNT, LARGEST_WINDOW
from vafl.protocol.staleness import DelayLog
from vafl.protocol.table import FOREVER, EmbeddingTable

_COUNTED_CLIENTS = 8  # whose delays are counted cell by cell at full cost
_FRUITLESS = 2  # epochs of every client skipped in a row: as things are there will be no step any more
RECALL_ROWS = 65_536  # rows of one request for what a client lost


class Server:
    """Holds the labels, the head theta_0 and the table; knows the clients only by their messages.

    Args:
        table: the last embedding of every row and client.
        labels: [training rows], one label a row; rows of the table beyond are held out: no step uses them.
        head, loss, descent, mask, weights: as in `HeadStep`.
        rule: when to act.
        bound: the delay bound, if any.
        marks: remembers the marks of the clients' ledgers; by default only while this object lives.

    Attributes:
        iteration: the global counter k: how many steps were made.
        last_iteration: no step is made beyond it.
        activations: how many uploads each client has made.
        durable: how many of them the last checkpoint holds.
        absent: the clients that are gone.
        finished: the clients that make no more uploads.
        overdue: the clients that let a request expire. They are not asked again before they answer or join.
        requests: what was asked of clients and is not answered yet.
        recall_rows: so many lost rows at most are asked for at a time: answers must fit into messages.
        run: the run's random number, for clients to keep with their models.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        labels: Array,
        head: nn.Module,
        loss: Loss,
        descent: Descent,
        rule: Rule,
        bound: DelayBound | None = None,
        mask: Mask | None = None,
        weights: Matrix | None = None,
        *,
        marks: MarkMemory | None = None,
    ) -> None:
        self.table, self.head, self.rule, self.bound = table, head, rule, bound
        self.descent = descent
        every = 1 if bound else max(1, table.clients // _COUNTED_CLIENTS)
        self.delays = DelayLog(table.clients, bound.limit if bound else None, every)
        self.iteration = 0
        self.last_iteration = FOREVER
        self.activations = [0] * table.clients
        self.durable = [0] * table.clients
        self.absent: set[int] = set()
        self.finished: set[int] = set()
        self.overdue: set[int] = set()
        self.requests = Requests()
        self.recall_rows = RECALL_ROWS
        self.run = 0
        self._met: set[int] = set()
        self._forgettable = 0  # uploads of one client that a crash can have made this server forget
        self._evaluate = HeadStep(labels, descent.trains(head), loss, descent, mask, weights)
        self.losses = self._evaluate.losses
        self._training_rows = len(labels)
        self._sequences = [-1] * table.clients
        self._waiting: list[Turn] = []
        self._group: list[Turn] = []
        self._answers = Answers(table.clients)
        self._marks = marks or Marks()

    @np.errstate(all="ignore")  # what is not finite any more is noticed where it is used
    def receive(self, message: ClientMessage) -> list[ServerMessage]:
        """Takes one message and gives the replies that follow from it, in order.

        Raises:
            InvalidMessage: the message broke a rule; nothing has changed.
            Diverged: the loss or its gradient is not finite any more.
        """
        if not 0 <= message.client < self.table.clients:
            raise InvalidMessage(
                "VFL-4171", f"client must be in 0..{self.table.clients - 1}. Found {message.client}."
            )
        if message.client in self.absent and not isinstance(message, Join | Leave):
            raise InvalidMessage(
                "VFL-4172", f"client {message.client} is gone: it must join before it says anything else."
            )
        return self._take(message) + self._advance()

    may_stand_in = True
    """Whether a default can stand in for the embeddings of a client that does not answer."""

    @property
    def may_poll(self) -> bool:
        """Whether an evaluation can be asked for now."""
        return True

    def poll(self, rows: Rows, best: int = -1, *, restore: bool = False) -> Poll:
        """Ask every client that is here and answers for embeddings of held-out rows.

        `best` and `restore` are as in `Evaluate`.
        """
        silent = self.absent | self.overdue
        present = [client for client in range(self.table.clients) if client not in silent]
        return self.requests.poll(present, rows, best, restore=restore)

    @property
    def open_requests(self) -> Set[int]:
        """The numbers of the requests that are waited for."""
        return self.requests.open.keys()

    def expire(self, numbers: Iterable[int]) -> list[ServerMessage]:
        """Stop waiting for these requests; return the replies to steps that waited for them.

        The caller keeps the clock. The delay bound goes on by its policy; under `wait` its own requests do
        not expire. An answer that comes later is taken as usual, and its client may be asked again.
        """
        for number in numbers:
            request = self.requests.open[number]
            if self.bound is not None:
                if self.bound.waits_for(request.client, number):
                    continue
                self.bound.settle(request.client, number, declined=True)
            self.requests.expire(request)
            self.overdue.add(request.client)
        return self._advance()

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
        # A count beyond any run's reach was claimed by a hostile client, before claims were bounded. The
        # iteration is at least the number of this client's uploads that were stepped on.
        counts = [count if count <= LARGEST_COUNT // 2 else iteration for count in activations]
        self.activations, self.durable = counts, list(counts)
        self._forgettable = forgettable
        self.descent.restore(optimiser)
        self.table.lose_since(iteration)

    def is_under_way(self, client: int) -> bool:
        """Whether this client has uploaded anything in this run."""
        return self.activations[client] > 0

    def settled(self) -> list[int]:
        """How many uploads of each client were acted on: those before the first that still waits.

        A checkpoint holds these. One that waits is lost in a crash, and must be said again."""
        counts = list(self.activations)
        for turn in self._waiting:
            if turn.steps:
                counts[turn.client] = min(counts[turn.client], turn.activation)
        return counts

    def made_durable(self, activations: Sequence[int]) -> list[Durable]:
        """A checkpoint holds so many uploads of each client: tells those whose number has grown."""
        grown = [m for m, count in enumerate(activations) if count > self.durable[m]]
        self.durable = list(activations)
        return [Durable(client, activations[client]) for client in grown]

    @property
    def over(self) -> bool:
        """Whether so many clients may upload or answer no more that no step can be made."""
        hopeless = self.bound is not None and self.bound.hopeless
        declined = self.fruitless and not self.absent  # by whoever the uploads are skipped for want of
        return hopeless or declined or self.table.clients - len(self.finished) < self.rule.quorum

    @property
    def fruitless(self) -> bool:
        """Whether all uploads have been skipped for so long that, unless a client comes back, all will be."""
        return self.bound is not None and self.bound.skipped_rows >= _FRUITLESS * self.table.stored_at.size

    def owes_reply(self, client: int) -> bool:
        """Whether an upload of a client waits for a step: the client may have nothing to say until then."""
        return any(turn.client == client for turn in self._waiting)

    def waiting_for(self, names: Sequence[str] = ()) -> str:
        """What the server is waiting for, in words, for whoever watches.

        Args:
            names: what the clients are called; without, they are numbered.
        """
        who, gone = "" if names else "clients ", listed(self.absent, names)
        if self.bound and self._group:
            rows = np.concatenate([turn.rows for turn in self._group])
            lacking = self.bound.stale(self.table, rows, self.iteration).keys() | self.bound.asked.keys()
            return f"fresh embeddings from {who}{listed(lacking, names)} (delay bound); gone: {gone}"
        if self.bound and self.bound.skipped_rows:
            return (
                f"fresh embeddings from {who}{listed(self.bound.lacking, names)}: every upload since "
                f"iteration {self.iteration} was skipped for want of them (delay bound); gone: {gone}"
            )
        here = listed({turn.client for turn in self._waiting}, names)
        return f"uploads of {self.rule.quorum} different clients; it has those of {here}; gone: {gone}"

    # --- each kind of message: first every check, then the change ---

    def _take(self, message: ClientMessage) -> list[ServerMessage]:
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
        else:
            raise InvalidMessage(
                "VFL-4173",
                f"nothing is masked in this run. Found {type(message).__name__} of client {message.client}: "
                "all parties must agree on privacy.secure_sum.",
            )
        return replies

    def _take_upload(self, upload: Upload) -> list[ServerMessage]:
        client = upload.client
        self._check_sequence(client, upload.sequence)
        self.table.check(client, upload.rows, upload.embeddings)
        self._check_turn(client, upload.activation, upload.rows)
        self._sequences[client] = upload.sequence
        self._store(upload)
        self.activations[client] += 1
        if not upload.answer:
            self._answers.unasked[client] = upload
        self._waiting.append(Turn(client, upload.activation, upload.rows, True, upload.answer))
        return self._end_older_rounds() if self.rule.common_rows else []

    def _take_refresh(self, refresh: Refresh) -> list[ServerMessage]:
        self._check_sequence(refresh.client, refresh.sequence)
        self.table.check(refresh.client, refresh.rows, refresh.embeddings)
        more: list[ServerMessage] = []
        if refresh.request is not None:
            more = self._settle(self.requests.check(refresh), declined=False)
        self._sequences[refresh.client] = refresh.sequence
        self._store(refresh)
        return more

    def _take_query(self, query: Query) -> list[ServerMessage]:
        self._check_sequence(query.client, query.sequence)
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
            return [self._skipped(turn, "this upload is not known any more")]
        self._waiting.append(replace(turn, rows=upload.rows))
        return []

    def _take_decline(self, decline: Decline) -> list[ServerMessage]:
        self._check_sequence(decline.client, decline.sequence)
        more = self._settle(self.requests.check(decline), declined=True)
        self._sequences[decline.client] = decline.sequence
        return more

    def _take_finished(self, finished: Finished) -> list[ServerMessage]:
        self._check_sequence(finished.client, finished.sequence)
        self._sequences[finished.client] = finished.sequence
        self.finished.add(finished.client)
        return []

    def _take_mark(self, message: LedgerMark) -> list[ServerMessage]:
        self._check_sequence(message.client, message.sequence)
        self._sequences[message.client] = message.sequence
        self._marks.remember(message)
        return []

    def _take_leave(self, leave: Leave) -> list[ServerMessage]:
        """What the client had uploaded stays, and counts; its answers are kept for when it is back."""
        self.absent.add(leave.client)
        self._forget_requests(leave.client)
        return []

    def _take_join(self, join: Join) -> list[ServerMessage]:
        """Both sides say where they stand; what one of them has forgotten is said again or given up."""
        client = join.client
        self._met.add(client)
        self.absent.discard(client)
        self.finished.discard(client)
        self._sequences[client] = -1  # a connection counts its messages anew
        self._forget_requests(client)
        recalled = self._recall(client, join)
        self._drop_turns(client, join.activation)
        self.activations[client] = max(self.activations[client], join.applied)
        mark = self._marks.recall(client)
        counts = tuple(self.activations)
        welcome = Welcome(client, self.iteration, counts, self.durable[client], self.run, mark)
        owed = self._owed(client, range(join.applied, min(join.activation, self.activations[client])))
        return [welcome, *owed, *recalled]

    def _owed(self, client: int, flights: range) -> list[ServerMessage]:
        """Answers to uploads that were taken and whose answers may have been lost on the way."""
        waiting = {turn.activation for turn in self._waiting if turn.client == client}
        owed: list[ServerMessage] = []
        for activation, answer in self._answers.owed(client, flights, waiting):
            turn = Turn(client, activation, NO_ROWS, False, True)
            owed.append(answer or self._skipped(turn, "the answer to this upload was lost"))
        return owed

    def _recall(self, client: int, join: Join) -> list[ServerMessage]:
        """Asks again for embeddings the server lost, and for those made by what the client's model lost."""
        if join.activation < self.activations[client]:
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
        """The client waits for no answer from that activation on, and asks its queries again."""
        mine = [turn for turn in self._waiting if turn.client == client]
        dropped = [turn for turn in mine if not turn.steps or turn.activation >= activation]
        self._finish(dropped)
        if self.rule.common_rows:  # those rounds are not over: the client uploads them again
            self.activations[client] -= sum(turn.steps for turn in dropped)
        if any(turn in dropped for turn in self._group):
            self._group = []
            if self.bound:
                self.bound.begin_step()

    def _forget_requests(self, client: int) -> None:
        self.requests.forget(client)
        self.overdue.discard(client)
        if self.bound:
            self.bound.forget(client)

    def _settle(self, request: Asked, *, declined: bool) -> list[ServerMessage]:
        """Takes note of an answer; gives what is to be asked next."""
        self.overdue.discard(request.client)
        if self.bound:
            self.bound.settle(request.client, request.number, declined=declined)
        return [*self.requests.answered(request, declined=declined)]

    def _store(self, message: Upload | Refresh) -> None:
        """Stores embeddings as of the iteration whose model they were made with.

        That is now, unless the client had yet to take in answers it was sent: then it is the
        iteration of the first of those.
        """
        client = message.client
        unapplied = self._answers.first_unapplied(client, self.activations[client] - message.in_flight)
        iteration = unapplied.iteration if unapplied else self.iteration
        self.table.store(client, message.rows, message.embeddings, iteration)

    def _check_sequence(self, client: int, sequence: int) -> None:
        require_growth(client, sequence, self._sequences[client])

    def _check_join(self, join: Join) -> None:
        """Raise InvalidMessage if the client claims more answered uploads than the run can have reached.

        A restored server has forgotten the uploads it took after its checkpoint. It learns of them when a
        client joins for the first time since, and only as many as fit between two checkpoints. From then on
        it knows of every upload that was answered. All other clients look ahead from this number, so a free
        claim would send them anywhere.
        """
        known = self.activations[join.client]
        known += 0 if join.client in self._met else self._forgettable
        if join.applied > known:
            raise InvalidMessage(
                "VFL-4175",
                f"at most {known} uploads of client {join.client} can have been answered. Found "
                f"{join.applied}. Resume it with the state it kept of this run, or start it afresh.",
            )
        if join.activation - join.applied > LARGEST_WINDOW:
            raise InvalidMessage(
                "VFL-4176",
                f"a client may have {LARGEST_WINDOW} uploads in flight. "
                f"Found {join.activation - join.applied} of client {join.client}.",
            )

    def _check_turn(self, client: int, activation: int, rows: Rows) -> None:
        """Whether an upload is the client's next, and of rows it may be of."""
        if activation != self.activations[client]:
            raise InvalidMessage(
                "VFL-4177",
                f"the next upload of client {client} must be activation {self.activations[client]}. "
                f"Found {activation}.",
            )
        many = len(self._waiting) >= LARGEST_WINDOW
        if many and sum(turn.client == client for turn in self._waiting) >= LARGEST_WINDOW:
            raise InvalidMessage(
                "VFL-4178",
                f"a client may have {LARGEST_WINDOW} uploads in flight. Found one more of client {client}: "
                "it must wait for answers.",
            )
        if self.table.rows > self._training_rows and int(rows.max()) >= self._training_rows:
            raise InvalidMessage(
                "VFL-4179", f"rows of an upload must be below {self._training_rows}: the others are held out."
            )
        for turn in self._waiting if self.rule.common_rows else ():
            if turn.activation == activation and not np.array_equal(turn.rows, rows):
                raise InvalidMessage(
                    "VFL-4180",
                    f"the sync rule needs one common minibatch. Client {client} uploaded other "
                    f"rows than client {turn.client}: the schedules' seeds must agree.",
                )

    def _end_older_rounds(self) -> list[ServerMessage]:
        """Sync, after a crash made somebody forget: only the newest round can still be completed."""
        newest = max(turn.activation for turn in self._waiting)
        older = [turn for turn in self._waiting if turn.steps and turn.activation < newest]
        self._finish(older)
        return [self._skipped(turn, "the others are past this round") for turn in older if turn.answers]

    # --- deciding and stepping ---

    def _advance(self) -> list[ServerMessage]:
        """Makes every step the rule and the bound allow now."""
        replies: list[ServerMessage] = []
        while self._waiting and self.iteration < self.last_iteration:
            self._group = self._group or self.rule.ready(self._waiting)
            if not self._group:
                return replies
            if self.bound and self._must_wait(self.bound, replies):
                return replies
            if self._group:
                group, self._group = self._group, []
                self._finish(group)
                replies += self._step(group)
        return replies

    def _must_wait(self, bound: DelayBound, replies: list[ServerMessage]) -> bool:
        """Asks for what the step lacks; skips what cannot be had, if that is the policy."""
        rows = np.concatenate([turn.rows for turn in self._group])
        stale = bound.stale(self.table, rows, self.iteration)
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
        self._waiting = [turn for turn in self._waiting if turn not in turns]

    def _skipped(self, turn: Turn, reason: str) -> Skipped:
        self._answers.close(turn.client, turn.activation)
        return Skipped(turn.client, turn.activation, self.iteration, tuple(self.activations), reason)

    def _step(self, group: Sequence[Turn]) -> list[ServerMessage]:
        """One evaluation of the loss for all turns; the head moves by the mean over them."""
        shared, iteration = self.rule.common_rows, self.iteration
        self._record_delays(group[:1] if shared else group, shared)
        parts = self._evaluate(self.table, group, iteration, shared=shared)
        self.iteration += group[0].steps
        counts = tuple(self.activations)
        with made_here():
            answers = [
                Gradient(turn.client, turn.activation, iteration, part, counts)
                for turn, part in zip(group, parts, strict=True)
                if turn.answers
            ]
        for answer in answers:
            self._answers.add(answer)
        return list(answers)

    def _record_delays(self, turns: Sequence[Turn], shared: bool) -> None:
        """Notes how stale the cells were. With many clients a share of the rows stands for all of them, so
        that a step costs the same for 4 or 40, unless a bound asks for each."""
        for turn in turns:
            rows = self.delays.sample(turn.rows)
            if len(rows):
                self.delays.record(self.table, rows, self.iteration, None if shared else turn.client)


def listed(clients: Iterable[int], names: Sequence[str]) -> str:
    """The clients by name; by number where they have none."""
    found = sorted(clients)
    return ", ".join(names[client] for client in found) or "nobody" if names else str(found)
