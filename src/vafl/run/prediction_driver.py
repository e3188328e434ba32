"""Drive a federation that only predicts: `Batch` scores a table in chunks, `Live` answers HTTP requests.

The server's worker thread calls them after it has handled messages, and periodically without messages.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from vafl.arrays import RowIds, States
from vafl.config.run_settings import PredictionSettings
from vafl.errors import Stalled
from vafl.protocol.inquiry import ANSWERED, Inquiry
from vafl.protocol.messages import ServerMessage
from vafl.protocol.scoring import Scorer
from vafl.transport.grpc.server import FederationServer

Served = FederationServer[Scorer]
_AHEAD = 2  # chunks under way at a time, so that clients embed one while another is in transit


@dataclass
class Batch:
    """Scores rows in chunks, in ascending order.

    Args:
        rows: the rows to score, ascending.
        write: called with each finished chunk: rows, outputs [rows, outputs], states [rows, clients].
    """

    rows: RowIds
    settings: PredictionSettings
    write: Callable[[RowIds, Tensor, States], None]
    interrupted: bool = False
    done: int = 0
    _requested: int = 0
    _began: bool = False
    _under_way: deque[tuple[Inquiry, float]] = field(default_factory=deque)

    def __call__(self, federation: Served) -> list[ServerMessage]:
        """Write finished chunks, request further ones and return the messages to send."""
        if self.interrupted:
            federation.finish("the server was told to stop")
        if federation.began is None or self.interrupted:
            return []
        scorer = federation.server
        if not self._began:
            self._began = True
            scorer.start_without(federation.seen)
        while self._under_way and self._is_over(scorer, *self._under_way[0]):
            self._finish(scorer, self._under_way.popleft()[0])
        messages: list[ServerMessage] = []
        while len(self._under_way) < _AHEAD and self._requested < len(self.rows):
            chunk = self.rows[self._requested : self._requested + self.settings.chunk]
            inquiry, requests = scorer.ask(chunk, patient=True)
            self._under_way.append((inquiry, time.monotonic()))
            self._requested += len(chunk)
            messages += requests
        if self.done == len(self.rows):
            federation.finish(f"{self.done:,} records were scored")
        return messages

    def _is_over(self, scorer: Scorer, inquiry: Inquiry, asked_at: float) -> bool:
        if inquiry.is_open and time.monotonic() - asked_at > self.settings.patience:
            scorer.give_up(inquiry)
        return not inquiry.is_open

    def _finish(self, scorer: Scorer, inquiry: Inquiry) -> None:
        if not (inquiry.states == ANSWERED).any():
            raise Stalled(
                "VFL-7171",
                "at least one client must answer for every chunk. Found no answer for rows "
                f"{inquiry.rows[0]}..{inquiry.rows[-1]}. Check that the clients are running and that their "
                "privacy budgets are not exhausted (`vafl privacy`).",
            )
        self.write(inquiry.rows, scorer.score(inquiry), inquiry.states)
        self.done += len(inquiry.rows)


@dataclass(frozen=True)
class Answer:
    """The answer to a live question, in the order of its rows: predictions, and the state of each client."""

    values: list[list[float]]
    states: list[list[int]]


@dataclass(frozen=True, eq=False)
class _Question:
    rows: RowIds
    answer: "asyncio.Future[Answer]"


class Live:
    """Answers questions as they arrive.

    Questions that arrive within `prediction.gather` seconds of each other share their requests.

    A question moves through three lists. `ask` and `_hand_on` run on the event loop, `__call__` in the
    server's worker thread:

        _gathered ──gather elapsed, or full──> _to_ask ──worker──> _under_way ──answered or deadline──> answer

    `_to_ask` is the only list that both threads use. It is a deque, whose append and popleft are atomic.

    Args:
        finish: converts the head's outputs [rows, outputs] into the values that callers receive.
        most_rows: the most rows in one request, so that answers fit into messages. No question has more.
    """

    def __init__(
        self, settings: PredictionSettings, finish: Callable[[Tensor], Tensor], most_rows: int
    ) -> None:
        self._settings, self._finish, self._most_rows = settings, finish, most_rows
        self._gathered: list[_Question] = []
        self._to_ask: deque[list[_Question]] = deque()
        self._under_way: list[tuple[Inquiry, float, list[_Question]]] = []

    # --- on the event loop ---

    async def ask(self, federation: Served, rows: RowIds) -> Answer:
        """Return the answer for these rows. Wait for the clients until the deadline at the latest."""
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
            return  # they were handed on early, because there were too many rows
        self._to_ask.append(self._gathered)
        self._gathered = []
        federation.attend()
        # Wake the worker at the deadline, too, in case no message arrives until then.
        asyncio.get_running_loop().call_later(self._settings.deadline, federation.attend)

    # --- in the worker thread ---

    def __call__(self, federation: Served) -> list[ServerMessage]:
        """Send new questions, answer finished ones and return the messages to send."""
        scorer = federation.server
        messages: list[ServerMessage] = []
        while self._to_ask:
            questions = self._to_ask.popleft()
            rows = np.unique(np.concatenate([question.rows for question in questions]))
            inquiry, requests = scorer.ask(rows)
            self._under_way.append((inquiry, time.monotonic() + self._settings.deadline, questions))
            messages += requests
        waiting = []
        for inquiry, deadline, questions in self._under_way:
            if inquiry.is_open and time.monotonic() >= deadline:
                scorer.give_up(inquiry)
            if inquiry.is_open:
                waiting.append((inquiry, deadline, questions))
            else:
                self._answer(scorer, inquiry, questions)
        self._under_way = waiting
        return messages

    def _answer(self, scorer: Scorer, inquiry: Inquiry, questions: list[_Question]) -> None:
        """Give every question its rows of the inquiry's outputs."""
        # Convert all rows to Python values at once. A conversion per question would dominate the cost.
        values, states = self._finish(scorer.score(inquiry)).tolist(), inquiry.states.tolist()
        answers = []
        for question in questions:
            places = np.searchsorted(inquiry.rows, question.rows).tolist()
            answer = Answer([values[place] for place in places], [states[place] for place in places])
            answers.append((question.answer, answer))
        questions[0].answer.get_loop().call_soon_threadsafe(_deliver, answers)


def _deliver(answers: list[tuple["asyncio.Future[Answer]", Answer]]) -> None:
    for future, answer in answers:
        if not future.done():  # the caller may have disconnected
            future.set_result(answer)
