"""What drives a federation that makes no steps: chunk after chunk of a table, or questions as they come.

Both are called by the server's worker, after messages were handled and every so often without any.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vafl.config.run_settings import PredictionSettings
from vafl.errors import Stalled
from vafl.protocol.messages import ServerMessage
from vafl.protocol.rows import Rows
from vafl.protocol.scoring import ANSWERED, Inquiry, Scorer
from vafl.transport.grpc.server import FederationServer

Served = FederationServer[Scorer]
States = npt.NDArray[np.uint8]
_AHEAD = 2  # chunks asked for at a time: clients embed one while another travels


@dataclass
class Batch:
    """Scores rows, chunk after chunk, in their order.

    Args:
        rows: ascending.
        write: takes each chunk: rows, outputs [rows, outputs], states [rows, clients].
    """

    rows: Rows
    settings: PredictionSettings
    write: Callable[[Rows, Tensor, States], None]
    interrupted: bool = False
    done: int = 0
    _asked: int = 0
    _began: bool = False
    _under_way: deque[tuple[Inquiry, float]] = field(default_factory=deque)

    def __call__(self, federation: Served) -> list[ServerMessage]:
        """Whatever is due now; gives messages to send."""
        if self.interrupted:
            federation.finish("the server was told to stop")
        if federation.began is None or self.interrupted:
            return []
        scorer = federation.server
        if not self._began:
            self._began = True
            scorer.overdue |= (
                scorer.absent - federation.seen
            )  # they were waited for; others are about to join
        while self._under_way and self._is_over(scorer, *self._under_way[0]):
            self._finish(scorer, self._under_way.popleft()[0])
        said: list[ServerMessage] = []
        while len(self._under_way) < _AHEAD and self._asked < len(self.rows):
            chunk = self.rows[self._asked : self._asked + self.settings.chunk]
            inquiry, requests = scorer.ask(chunk, patient=True)
            self._under_way.append((inquiry, time.monotonic()))
            self._asked += len(chunk)
            said += requests
        if self.done == len(self.rows):
            federation.finish(f"{self.done:,} records were scored")
        return said

    def _is_over(self, scorer: Scorer, inquiry: Inquiry, asked_at: float) -> bool:
        if inquiry.is_open and time.monotonic() - asked_at > self.settings.patience:
            scorer.give_up(inquiry)
        return not inquiry.is_open

    def _finish(self, scorer: Scorer, inquiry: Inquiry) -> None:
        if not (inquiry.states == ANSWERED).any():
            raise Stalled(
                "VFL-7171",
                f"no client answers any more: nothing came for rows {inquiry.rows[0]}..{inquiry.rows[-1]}. "
                "Are the clients running, and are their privacy budgets not spent?",
            )
        self.write(inquiry.rows, scorer.score(inquiry), inquiry.states)
        self.done += len(inquiry.rows)


@dataclass(frozen=True)
class Answer:
    """To a live question, in the order of its rows: what the model says, and each client's state."""

    values: list[list[float]]
    states: list[list[int]]


@dataclass(frozen=True, eq=False)
class _Question:
    rows: Rows
    answer: "asyncio.Future[Answer]"


class Live:
    """Answers questions as they come; those that come at about the same time are asked together.

    Args:
        finish: makes of the head's outputs [rows, outputs] what callers are told.
        most_rows: that are asked for together: answers must fit into messages. No question has more.
    """

    def __init__(
        self, settings: PredictionSettings, finish: Callable[[Tensor], Tensor], most_rows: int
    ) -> None:
        self._settings, self._finish, self._most_rows = settings, finish, most_rows
        self._gathered: list[_Question] = []
        self._to_ask: deque[list[_Question]] = deque()
        self._under_way: list[tuple[Inquiry, float, list[_Question]]] = []

    # --- on the event loop ---

    async def ask(self, federation: Served, rows: Rows) -> Answer:
        """Waits for the clients, but no longer than the deadline."""
        loop = asyncio.get_running_loop()
        question = _Question(rows, loop.create_future())
        if sum(len(other.rows) for other in self._gathered) + len(rows) > self._most_rows:
            self._hand_on(federation)
        self._gathered.append(question)
        if len(self._gathered) == 1:
            loop.call_later(self._settings.gather, self._hand_on, federation)
        return await question.answer

    def _hand_on(self, federation: Served) -> None:
        if not self._gathered:
            return  # they were too many to wait
        self._to_ask.append(self._gathered)
        self._gathered = []
        federation.attend()
        asyncio.get_running_loop().call_later(self._settings.deadline, federation.attend)

    # --- the worker's part ---

    def __call__(self, federation: Served) -> list[ServerMessage]:
        """Whatever is due now; gives messages to send."""
        scorer = federation.server
        said: list[ServerMessage] = []
        while self._to_ask:
            questions = self._to_ask.popleft()
            rows = np.unique(np.concatenate([question.rows for question in questions]))
            inquiry, requests = scorer.ask(rows)
            self._under_way.append((inquiry, time.monotonic() + self._settings.deadline, questions))
            said += requests
        waiting = []
        for inquiry, deadline, questions in self._under_way:
            if inquiry.is_open and time.monotonic() >= deadline:
                scorer.give_up(inquiry)
            if inquiry.is_open:
                waiting.append((inquiry, deadline, questions))
            else:
                self._answer(scorer, inquiry, questions)
        self._under_way = waiting
        return said

    def _answer(self, scorer: Scorer, inquiry: Inquiry, questions: list[_Question]) -> None:
        """Plain values are made of all rows at once: for each question by itself that would cost the most."""
        values, states = self._finish(scorer.score(inquiry)).tolist(), inquiry.states.tolist()
        answers = []
        for question in questions:
            places = np.searchsorted(inquiry.rows, question.rows).tolist()
            own = Answer([values[place] for place in places], [states[place] for place in places])
            answers.append((question.answer, own))
        questions[0].answer.get_loop().call_soon_threadsafe(_deliver, answers)


def _deliver(answers: list[tuple["asyncio.Future[Answer]", Answer]]) -> None:
    for future, answer in answers:
        if not future.done():  # whoever asked may have hung up
            future.set_result(answer)
