"""Connections break at any moment and come back: every upload counts once, and delays stay exact."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.federation import Exchange, parameters, run_of, same, vertical_data
from vafl.protocol.messages import Gradient, Refresh, Skipped, Upload

CLIENTS = 3
DATA = vertical_data(rows=9, clients=CLIENTS, shape=(2,))


def with_one_in_flight_where_it_must_be(rule):
    """Sync rounds and the query-first order have one upload in flight."""
    one = rule["name"] == "sync" or rule["order"] == "query-first"
    return {**rule, "window": 1} if one else rule


rules = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["async", "t-sync", "sync"]),
        "t": st.integers(1, CLIENTS),
        "delay_bound": st.sampled_from([0, 0, 1, 4]),
        "when_unanswered": st.sampled_from(["wait", "skip", "use"]),
        "order": st.sampled_from(["upload-first", "query-first"]),
        "window": st.integers(1, 4),
    }
).map(with_one_in_flight_where_it_must_be)
schedules = st.fixed_dictionaries({"refresh": st.sampled_from(["none", "random:2", "all", "lookahead"])})
histories = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=20, max_size=100)


class Ledger(Exchange):
    """Counts the outcome of every upload, and computes the delay of every embedding independently."""

    def __init__(self, run):
        super().__init__(run)
        self.stepped, self.applied, self.skipped = Counter(), Counter(), set()
        self.answered = [{} for _ in self.clients]  # activation -> iteration of every gradient so far
        self.learned = {}  # upload or refresh -> the activations that its model had applied
        self._count_steps()
        for client in self.clients:
            self._count_applied(client)

    def _count_steps(self):
        step = self.server._step

        def counted(group):
            self.stepped.update((turn.client, turn.activation) for turn in group if turn.steps)
            return step(group)

        self.server._step = counted

    def _count_applied(self, client):
        apply = client._apply

        def counted(flight, answer):
            apply(flight, answer)
            self.applied[client.index, answer.activation] += 1

        client._apply = counted

    def play(self, move):
        what, i = move
        if what == "up":
            self._heard(self.up[i].popleft())
            return
        if what == "down":
            self._note_skipped(self.down[i][0])
        before = len(self.up[i])
        super().play(move)
        learned = {activation for client, activation in self.applied if client == i}
        for message in list(self.up[i])[before:]:
            self.learned.setdefault(self._key(message), learned)

    def _note_skipped(self, message):
        if isinstance(message, Skipped) and message.activation >= self.clients[message.client].applied:
            self.skipped.add((message.client, message.activation))

    @staticmethod
    def _key(message):
        """A repeated upload is the same upload, made with the model of the first attempt."""
        return (message.client, message.activation) if isinstance(message, Upload) else message

    def _heard(self, message):
        if not isinstance(message, Upload | Refresh):
            self._dispatch(self.server.receive(message))
            return
        client, learned = message.client, self.learned[self._key(message)]
        missed = [k for activation, k in self.answered[client].items() if activation not in learned]
        expected = min([self.server.iteration, *missed])
        self._dispatch(self.server.receive(message))
        assert set(self.server.table.stored_at[message.rows, client].tolist()) == {expected}

    def _dispatch(self, replies):
        for reply in replies:
            if isinstance(reply, Gradient):
                self.answered[reply.client].setdefault(reply.activation, reply.iteration)
        super()._dispatch(replies)

    def live(self, history):
        """Play a history in which connections break and resume at any moment; in the end all are up."""
        for choice, upheaval in history:
            if upheaval < CLIENTS:
                self.leave(upheaval)
            elif upheaval < 2 * CLIENTS:  # also if the server has not noticed the broken connection
                self.join(upheaval - CLIENTS)
            if moves := self.moves():
                self.play(moves[choice % len(moves)])
        for client in sorted(self.server.absent):
            self.join(client)
        self.deliver()


@given(rules, schedules, histories)
def test_every_upload_counts_exactly_once_whenever_connections_break(rule, schedule, history):
    """`Ledger` also checks that every embedding is stored under the first answer its model had missed."""
    ledger = Ledger(run_of(DATA, rule=rule, schedule=schedule))
    ledger.live(history)
    stepped, applied, skipped = ledger.stepped.keys(), ledger.applied.keys(), ledger.skipped
    waiting = {(turn.client, turn.activation) for turn in ledger.server._waiting if turn.steps}
    assert set(ledger.stepped.values()) <= {1}
    assert set(ledger.applied.values()) <= {1}
    assert not applied & skipped
    assert not stepped & waiting
    may_skip = rule["delay_bound"] and rule["when_unanswered"] == "skip"
    assert may_skip or not skipped
    for client in ledger.clients:
        assert ledger.server.activations[client.index] == client.activation
        uploaded = {(client.index, activation) for activation in range(client.activation)}
        answered = {(client.index, activation) for activation in range(client.applied)}
        assert answered <= applied | skipped, "nothing is lost"
        assert may_skip or uploaded <= stepped | waiting
        if rule["order"] == "upload-first":
            assert uploaded & stepped == answered & applied, "who was stepped on has learned from it"
            assert uploaded - answered <= waiting


BREAKS = ["before its upload is heard", "before its answer is heard"]


@pytest.mark.parametrize("moment", BREAKS)
@pytest.mark.parametrize("rule", [{}, {"window": 3}, {"name": "t-sync", "t": 2}, {"name": "sync"}], ids=str)
def test_a_run_whose_connections_break_ends_as_if_they_had_not(rule, moment):
    whole, broken = (Exchange(run_of(DATA, rule=rule)) for _ in range(2))
    for turn in range(6):
        play_round(whole)
        play_round(broken, turn % CLIENTS, BREAKS.index(moment))
    assert whole.server.iteration == broken.server.iteration > 4
    assert same(parameters(whole.run), parameters(broken.run))
    assert whole.seen.summaries() == broken.seen.summaries()


def play_round(exchange, breaking=None, moment=None):
    """All clients wake and are received in order; one connection breaks, resumes, and is received again."""
    for client in exchange.clients:
        if not client.waiting:
            exchange.play(("wake", client.index))
    for i in range(CLIENTS):
        if (i, 0) == (breaking, moment):
            reconnect(exchange, i)
        while exchange.up[i]:
            exchange.play(("up", i))
    if moment == 1:
        reconnect(exchange, breaking)
    exchange.deliver()


def reconnect(exchange, i):
    exchange.leave(i)
    exchange.join(i)
    while exchange.down[i]:
        exchange.play(("down", i))
