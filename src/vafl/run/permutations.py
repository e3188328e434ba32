"""Permutation importance, computed from the clients' answers. This module has no clock and no network.

The importance of a group of features is how much worse the complete model predicts held-out rows after the
client has permuted these features among the rows.

A study passes through these phases. Each call of `Study.advance` moves it on as far as the answers allow:

    new ──> baseline: all clients answer for the unpermuted rows
        ──> permuting: each client has a queue of groups, and at most one request under way
        ──> done: all queues are empty and no request is under way
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from vafl.arrays import Flags, RowIds
from vafl.errors import Stalled
from vafl.models.metrics import Figures, Metric, Metrics
from vafl.models.probabilities import Calibration
from vafl.protocol.importance import ImportanceScorer
from vafl.protocol.inquiry import ANSWERED, Inquiry
from vafl.protocol.messages import EVERYTHING, Request


@dataclass
class Effect:
    """The effect of permuting a group of features on the predictions, with one entry per repeat.

    Attributes:
        loss: increase of the loss.
        headline: decrease in quality by the headline metric; positive if the predictions became worse.
        rows: number of rows that were measured.
    """

    loss: list[float] = field(default_factory=list)
    headline: list[float] = field(default_factory=list)
    rows: int = 0


class Study:
    """Asks every client to permute its groups of features in turn, and measures the effect.

    Clients work in parallel, each on one request at a time. Call `advance` whenever answers have arrived.

    Args:
        names: the clients' names.
        rows: held-out rows, ascending.
        labels: [rows].
        repeats: number of permutations of each group.
        calibration: the model's calibration; None uses the head's outputs unchanged.

    Attributes:
        baseline: every metric on the unpermuted rows.
        effects: (client, group) -> the measured effect.
        refused: (client, group) -> the reason why it was not measured.
        measured, planned: number of permutations that are done, and of all that are known so far.
    """

    def __init__(
        self,
        scorer: ImportanceScorer,
        names: Sequence[str],
        rows: RowIds,
        labels: Tensor,
        metrics: Metrics,
        repeats: int,
        calibration: Calibration | None = None,
    ) -> None:
        self._calibrate = calibration or Calibration()
        self.names = names
        self._scorer, self._rows, self._labels, self._metrics = scorer, rows, labels.numpy(), metrics
        self._repeats = repeats
        self._base: Inquiry | None = None
        self._answered = False
        self._queues: list[deque[str]] = [deque() for _ in range(scorer.clients)]
        self._asked: dict[int, tuple[Inquiry, str]] = {}
        self.baseline: Figures = {}
        self.effects: dict[tuple[int, str], Effect] = {}
        self.refused: dict[tuple[int, str], str] = {}
        self.measured = self.planned = 0

    @property
    def loss(self) -> Metric:
        """The loss that is measured: log loss for classes, root mean squared error for numbers."""
        return self._metrics.each[1]

    @property
    def headline(self) -> Metric:
        """The headline metric that is measured."""
        return self._metrics.headline

    @property
    def is_done(self) -> bool:
        return self._answered and not self._asked and not any(self._queues)

    @property
    def waiting(self) -> Sequence[Inquiry]:
        """The inquiries that wait for answers."""
        if self._base is not None and not self._answered:
            return [self._base]
        return [inquiry for inquiry, _ in self._asked.values()]

    @property
    def rows(self) -> int:
        """The number of rows that every client answered for."""
        return int(self._complete.sum()) if self._answered else 0

    def advance(self) -> list[Request]:
        """Process the answers that have arrived, and return the requests to send next.

        Raises:
            Stalled: a client answered for none of the unpermuted rows.
        """
        if self._base is None:
            self._base, requests = self._scorer.ask(self._rows, patient=True)
            return requests
        if not self._answered:
            if self._base.is_open:
                return []
            self._begin(self._base)
        to_send: list[Request] = []
        for client, queue in enumerate(self._queues):
            if client in self._asked and not self._asked[client][0].is_open:
                self._finish(client, *self._asked.pop(client))
            if client not in self._asked and queue:
                group = queue.popleft()
                inquiry, requests = self._scorer.ask_permuted(self._base, client, group)
                self._asked[client] = inquiry, group
                to_send += requests
        return to_send

    def _begin(self, base: Inquiry) -> None:
        self._answered = True
        self._complete: Flags = (base.states == ANSWERED).all(1)
        if not self._complete.any():
            silent = [name for m, name in enumerate(self.names) if (base.states[:, m] != ANSWERED).any()]
            raise Stalled(
                "VFL-7141",
                "importance needs rows that every client answers for. Found none: some or all answers are "
                f"missing from {', '.join(silent)}. Start these clients, or check their remaining privacy "
                "budgets with `vafl privacy`.",
            )
        self._outputs = self._calibrate(self._scorer.score(base).double().numpy())
        self.baseline = self._metrics.measure(self._outputs[self._complete], self._labels[self._complete])
        for client, queue in enumerate(self._queues):
            groups = (EVERYTHING, *self._scorer.groups.get(client, ()))
            queue.extend(group for group in groups for _ in range(self._repeats))
            self.planned += len(queue)

    def _finish(self, client: int, inquiry: Inquiry, group: str) -> None:
        self._scorer.close(inquiry)
        kept = self._complete & (inquiry.states == ANSWERED).all(1)
        if not kept.any():
            # The client refused or did not answer: drop the remaining repeats of this group, too.
            queue = self._queues[client]
            self.measured += 1 + queue.count(group)
            kept_groups = [other for other in queue if other != group]
            queue.clear()
            queue.extend(kept_groups)
            if (client, group) not in self.effects:
                self.refused[client, group] = self._scorer.reasons.get(client, "it did not answer")
            return
        self.measured += 1
        outputs = self._calibrate(self._scorer.outputs(inquiry).double().numpy()[kept])
        labels = self._labels[kept]
        effect = self.effects.setdefault((client, group), Effect())
        effect.rows = int(kept.sum())
        for metric, into in ((self.loss, effect.loss), (self._metrics.headline, effect.headline)):
            before, after = metric.measure(self._outputs[kept], labels), metric.measure(outputs, labels)
            if before is not None and after is not None:
                into.append(before - after if metric.higher_is_better else after - before)
