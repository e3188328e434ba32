"""The server: stores embeddings, decides by its rule, steps the head, answers gradients.

The whole life of an upload is here: `receive` -> checked -> stored -> the rule decides -> the delay
bound may ask for fresh cells -> one evaluation of the loss -> the head steps, gradients go back.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vafl.errors import InvalidMessage
from vafl.protocol.bound import DelayBound
from vafl.protocol.delays import DelayLog
from vafl.protocol.descent import Descent
from vafl.protocol.losslog import LossLog
from vafl.protocol.messages import (
    ClientMessage,
    Decline,
    Gradient,
    Join,
    Leave,
    Query,
    Refresh,
    ServerMessage,
    Skipped,
    Upload,
    Welcome,
    made_here,
)
from vafl.protocol.rules import Rule, Turn
from vafl.protocol.table import EmbeddingTable

Loss = Callable[[Tensor, Tensor], Tensor]


class Server:
    """Holds the labels, the head theta_0 and the table; knows the clients only by their messages.

    Args:
        table: the last embedding of every row and client.
        labels: [rows], one label a row.
        head: maps what `table.read` gives to outputs.
        loss: (outputs, labels) -> the loss of each row, [batch].
        descent: steps the head's parameters.
        rule: when to act.
        bound: the delay bound, if any.

    Attributes:
        iteration: the global counter k: how many steps were made.
        activations: how many uploads each client has made.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        labels: Tensor,
        head: nn.Module,
        loss: Loss,
        descent: Descent,
        rule: Rule,
        bound: DelayBound | None = None,
    ) -> None:
        self.table, self.head, self.rule, self.bound = table, head, rule, bound
        self.delays = DelayLog(table.clients, bound.limit if bound else None)
        self.losses = LossLog()
        self.iteration = 0
        self.activations = [0] * table.clients
        self.absent: set[int] = set()
        self._labels, self._loss, self._descent = labels, loss, descent
        self._sequences = [-1] * table.clients
        self._waiting: list[Turn] = []
        self._group: list[Turn] = []
        self._answerable: dict[int, Upload] = {}

    def receive(self, message: ClientMessage) -> list[ServerMessage]:
        """Takes one message and gives the replies that follow from it, in order.

        Raises:
            InvalidMessage: the message broke a rule; nothing has changed.
            Diverged: the loss or its gradient is not finite any more.
        """
        if not 0 <= message.client < self.table.clients:
            raise InvalidMessage(f"client must be in 0..{self.table.clients - 1}. Found {message.client}.")
        if message.client in self.absent and not isinstance(message, Join | Leave):
            raise InvalidMessage(
                f"client {message.client} is gone: it must join before it says anything else."
            )
        if isinstance(message, Upload):
            self._take_upload(message)
        elif isinstance(message, Refresh):
            self._take_refresh(message)
        elif isinstance(message, Query):
            self._take_query(message)
        elif isinstance(message, Decline):
            self._take_decline(message)
        elif isinstance(message, Leave):
            self._take_leave(message)
        else:
            return [self._welcome(message), *self._advance()]
        return self._advance()

    def waiting_for(self) -> str:
        """What the server is waiting for, in words, for whoever watches."""
        gone = sorted(self.absent)
        if self.bound and self._group:
            rows = torch.cat([turn.rows for turn in self._group])
            lacking = (
                self.bound.stale(self.table, rows, self.iteration).keys() | self.bound.outstanding.keys()
            )
            return f"fresh embeddings from clients {sorted(lacking)} (delay bound); gone: {gone}"
        here = sorted({turn.client for turn in self._waiting})
        return f"uploads of {self.rule.quorum} different clients; it has those of {here}; gone: {gone}"

    # --- each kind of message: first every check, then the change ---

    def _take_upload(self, upload: Upload) -> None:
        client = upload.client
        self._check_sequence(client, upload.sequence)
        if upload.activation != self.activations[client]:
            raise InvalidMessage(
                f"the next upload of client {client} must be activation {self.activations[client]}. "
                f"Found {upload.activation}."
            )
        self.table.check(client, upload.rows, upload.embeddings)
        if self.rule.common_rows:
            self._check_common_rows(upload)
        self._sequences[client] = upload.sequence
        self.activations[client] += 1
        self.table.store(client, upload.rows, upload.embeddings, self.iteration)
        if not upload.answer:
            self._answerable[client] = upload
        self._waiting.append(Turn(client, upload.activation, upload.rows, True, upload.answer))

    def _take_refresh(self, refresh: Refresh) -> None:
        self._check_sequence(refresh.client, refresh.sequence)
        self.table.check(refresh.client, refresh.rows, refresh.embeddings)
        if refresh.request is not None:
            self._require_bound().check(refresh)
            self._require_bound().settle(refresh)
        self._sequences[refresh.client] = refresh.sequence
        self.table.store(refresh.client, refresh.rows, refresh.embeddings, self.iteration)

    def _take_query(self, query: Query) -> None:
        self._check_sequence(query.client, query.sequence)
        upload = self._answerable.get(query.client)
        if upload is None or upload.activation != query.activation:
            raise InvalidMessage(
                f"client {query.client} has no unanswered upload of activation {query.activation}."
            )
        self._sequences[query.client] = query.sequence
        del self._answerable[query.client]
        self._waiting.append(Turn(query.client, query.activation, upload.rows, False, True))

    def _take_decline(self, decline: Decline) -> None:
        self._check_sequence(decline.client, decline.sequence)
        self._require_bound().check(decline)
        self._require_bound().settle(decline)
        self._sequences[decline.client] = decline.sequence

    def _take_leave(self, leave: Leave) -> None:
        self.absent.add(leave.client)
        self._drop_turns_of(leave.client)

    def _welcome(self, join: Join) -> Welcome:
        self.absent.discard(join.client)
        self._sequences[join.client] = -1  # a client that died has forgotten how far it had counted
        self._drop_turns_of(join.client)
        return Welcome(join.client, self.iteration, tuple(self.activations))

    def _drop_turns_of(self, client: int) -> None:
        """A client that went away, or begins anew, does not wait for answers any more."""
        self._waiting = [turn for turn in self._waiting if turn.client != client]
        self._answerable.pop(client, None)
        if self.bound:
            self.bound.forget(client)
            if any(turn.client == client for turn in self._group):  # only a bound keeps a group waiting
                self._group = []
                self.bound.begin_step()
        if self.rule.common_rows:  # the round is not over: the client uploads it again when it is back
            self.activations[client] = self.iteration

    def _check_sequence(self, client: int, sequence: int) -> None:
        if sequence <= self._sequences[client]:
            raise InvalidMessage(
                f"sequence of client {client} must grow beyond {self._sequences[client]}. Found {sequence}."
            )

    def _check_common_rows(self, upload: Upload) -> None:
        for turn in self._waiting:
            if turn.activation == upload.activation and not torch.equal(turn.rows, upload.rows):
                raise InvalidMessage(
                    f"the sync rule needs one common minibatch. Client {upload.client} uploaded other "
                    f"rows than client {turn.client}: the schedules' seeds must agree."
                )

    def _require_bound(self) -> DelayBound:
        if self.bound is None:
            raise InvalidMessage("no embeddings were asked for: this run has no delay bound.")
        return self.bound

    # --- deciding and stepping ---

    def _advance(self) -> list[ServerMessage]:
        """Makes every step the rule and the bound allow now."""
        replies: list[ServerMessage] = []
        while True:
            self._group = self._group or self.rule.ready(self._waiting)
            if not self._group:
                return replies
            if self.bound and self._must_wait(self.bound, replies):
                return replies
            if self._group:
                group, self._group = self._group, []
                self._finish(group)
                replies += self._step(group)

    def _must_wait(self, bound: DelayBound, replies: list[ServerMessage]) -> bool:
        """Asks for what the step lacks; skips what cannot be had, if that is the policy."""
        rows = torch.cat([turn.rows for turn in self._group])
        stale = bound.stale(self.table, rows, self.iteration)
        replies += bound.ask(stale, self.absent)
        if bound.must_wait(stale):
            return True
        bound.begin_step()
        if skipped := bound.to_skip(self._group, stale):
            self._finish(skipped)
            self._group = []
            reason = f"no fresh embeddings from clients {sorted(stale)} within delay bound {bound.limit}"
            replies += [self._skipped(turn, reason) for turn in skipped if turn.answers]
        return False

    def _finish(self, turns: Sequence[Turn]) -> None:
        self._waiting = [turn for turn in self._waiting if turn not in turns]

    def _skipped(self, turn: Turn, reason: str) -> Skipped:
        return Skipped(turn.client, turn.activation, self.iteration, tuple(self.activations), reason)

    def _step(self, group: Sequence[Turn]) -> list[ServerMessage]:
        """One evaluation of the loss for all turns; the head moves by the mean over them."""
        shared = self.rule.common_rows
        turns = group[:1] if shared else group
        rows = turns[0].rows if len(turns) == 1 else torch.cat([turn.rows for turn in turns])
        self._record_delays(turns, rows, shared)
        inputs = self.table.read(rows).requires_grad_()
        losses = self._loss(self.head(inputs), self._labels.index_select(0, rows))
        loss = losses.mean() if len(turns) == 1 else losses @ _mean_weights(turns)
        self.losses.check(float(loss.detach()), self.iteration)
        gradients = torch.autograd.grad(loss, [inputs, *self._descent.parameters])
        iteration = self.iteration
        if group[0].steps:
            self.losses.note(float(loss.detach()))
            self._descent.step(gradients[1:], iteration)
            self.iteration += 1
        parts = self._split(gradients[0], group, shared)
        counts = tuple(self.activations)
        with made_here():
            return [
                Gradient(turn.client, turn.activation, iteration, part, counts)
                for turn, part in zip(group, parts, strict=True)
                if turn.answers
            ]

    def _record_delays(self, turns: Sequence[Turn], rows: Tensor, shared: bool) -> None:
        delays = self.table.delays(rows, self.iteration)
        start = 0
        for turn in turns:
            end = start + len(turn.rows)
            self.delays.record(delays[start:end], None if shared else turn.client)
            start = end

    def _split(self, gradient: Tensor, group: Sequence[Turn], shared: bool) -> list[Tensor]:
        """Each client's own gradient of its own mean loss, [its batch, its width]."""
        if shared:
            blocks: Sequence[Tensor] = [gradient] * len(group)
        elif len(group) == 1:
            blocks = [gradient]
        else:
            blocks = torch.split(gradient * len(group), [len(turn.rows) for turn in group])
        if self.table.sums is not None:
            return list(blocks)
        columns = [self.table.columns[turn.client] for turn in group]
        return [block[:, column].contiguous() for block, column in zip(blocks, columns, strict=True)]


def _mean_weights(turns: Sequence[Turn]) -> Tensor:
    """Weights that make a sum over all rows the mean, over the turns, of each turn's mean."""
    sizes = [len(turn.rows) for turn in turns]
    return torch.cat([torch.full((size,), 1 / (size * len(turns))) for size in sizes])
