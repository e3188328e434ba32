"""Parties that crash and restart from a checkpoint: lost messages are repeated, and the run goes on."""

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.federation import Exchange, run_of, same, vertical_data
from vafl.protocol.messages import (
    Durable,
    Evaluate,
    Gradient,
    Join,
    Refresh,
    Request,
    Skipped,
    Upload,
    Welcome,
)
from vafl.protocol.table import FOREVER, EmbeddingTable

CLIENTS = 3
DATA = vertical_data(rows=9, clients=CLIENTS, shape=(2,))


class Fragile(Exchange):
    """An exchange whose parties write checkpoints and crash.

    `makers[row, client]` identifies the model that made a cell: the life of the client, and how many answers
    it had applied in that life. When a client crashes, its models since the last checkpoint are lost.
    """

    def __init__(self, **sections):
        self.sections = sections
        super().__init__(run_of(DATA, **sections))
        self.makers, self.made, self.dead, self.skips = {}, {}, set(), []
        self.lives = [0] * CLIENTS
        self.saved_clients = [self._client_state(client) for client in self.clients]
        self.save_server()

    def _client_state(self, client):
        model, optimiser = deepcopy(client.model.state_dict()), deepcopy(client.descent.state())
        return client.applied, client.iteration, model, optimiser, client._version

    def save_client(self, i):
        self.saved_clients[i] = self._client_state(self.clients[i])

    def kill_client(self, i):
        """Kill the process and its connection; start another process from the checkpoint."""
        applied, iteration, model, optimiser, version = self.saved_clients[i]
        self.dead |= {(i, self.lives[i], lost) for lost in range(version + 1, self.clients[i]._version + 1)}
        self.leave(i)
        self.lives[i] += 1
        self.clients[i] = run_of(DATA, **self.sections).runtime.clients[i]
        self.clients[i].model.load_state_dict(model)
        self.clients[i].restore(applied, iteration, deepcopy(optimiser))
        self.saved_clients[i] = self._client_state(self.clients[i])

    def save_server(self):
        head, optimiser = deepcopy(self.server.head.state_dict()), deepcopy(self.server.descent.state())
        self.saved_server = self.server.iteration, self.server.uploads_done(), head, optimiser

    def kill_server(self):
        """Kill the server. The table is a file and survives; every connection breaks."""
        iteration, activations, head, optimiser = self.saved_server
        old, seen, last = self.server.table, self.server.delays, self.server.last_iteration
        self.server = run_of(DATA, **self.sections).runtime.server
        self.server.table = EmbeddingTable(
            old.rows,
            old.widths,
            summed=old.sums is not None,
            memory=old.records,
        )
        self.server.head.load_state_dict(head)
        self.server.restore(iteration, activations, deepcopy(optimiser), forgettable=1000)
        self.server.delays, self.server.last_iteration = seen, last
        self.server.absent = set(range(CLIENTS))
        for i in range(CLIENTS):
            self.up[i].clear()
            self.down[i].clear()
            self.here[i] = False

    def play(self, move):
        what, i = move
        if what == "up":
            self._note_makers(self.up[i][0])
            super().play(move)
            return
        if what == "down" and isinstance(self.down[i][0], Skipped):
            self.skips.append(self.down[i][0])
        before = len(self.up[i])
        super().play(move)
        if self.clients[i].iteration < self.saved_clients[i][1]:
            self.save_client(i)  # a client's process also saves when the server was restored
        for message in list(self.up[i])[before:]:
            key = (i, self.lives[i], message.activation) if isinstance(message, Upload) else message
            self.made.setdefault(key, (i, self.lives[i], self.clients[i]._version))

    def _note_makers(self, message):
        if isinstance(message, Upload | Refresh):
            i = message.client
            key = (i, self.lives[i], message.activation) if isinstance(message, Upload) else message
            self.makers |= {(row, i): self.made[key] for row in message.rows.tolist()}

    def everybody_joins(self):
        for i in sorted(self.server.absent):
            self.join(i)

    def rounds(self, count):
        """Play this many rounds, in which every message arrives."""
        for _ in range(count):
            self.deliver()
            for client in self.clients:
                if self.here[client.index] and not client.waiting:
                    self.turn(client.index)


def requested(exchange, i):
    """Return the rows that requests in transit to a client ask for."""
    return sorted(row for m in exchange.down[i] if isinstance(m, Request) for row in m.rows.tolist())


# --- the server is restored ---


def test_a_restored_server_forgets_newer_cells_and_asks_for_them_again():
    exchange = Fragile(schedule={"batch_size": 2})
    exchange.rounds(1)
    exchange.save_server()
    kept = exchange.server.table.stored_at.copy()
    exchange.rounds(2)
    iteration = exchange.saved_server[0]
    newer = exchange.server.table.stored_at >= iteration
    assert newer.any()
    exchange.kill_server()
    server = exchange.server
    assert (server.iteration, server.activations) == (iteration, [1, 1, 1])
    assert (server.table.stored_at[newer] < -FOREVER).all()
    assert (server.table.stored_at[~newer] >= kept[~newer]).all()
    for i in range(CLIENTS):
        exchange.join(i)
        assert requested(exchange, i) == newer[:, i].nonzero()[0].tolist()
    exchange.deliver()
    assert (server.table.stored_at[newer] == iteration).all(), "fresh again"
    for i, client in enumerate(exchange.clients):
        rows = newer[:, i].nonzero()[0]
        cells = server.table.column(i)[rows]
        assert np.array_equal(cells, client.model(client._features[rows]).detach().numpy())


def test_a_large_loss_is_asked_for_in_parts():
    exchange = Fragile(schedule={"refresh": "all"})
    exchange.rounds(2)
    exchange.kill_server()
    exchange.server.recall_rows = 4
    exchange.join(0)
    asked = []
    while rows := requested(exchange, 0):
        asked.append(rows)
        exchange.deliver()
    assert asked == [[0, 1, 2, 3]], "then all were, each once the one before was answered"
    assert exchange.server.requests.of(0) == []
    assert exchange.server.requests.made == 3
    assert not len(exchange.server.table.lost(0))


def test_the_server_goes_on_from_where_the_clients_stand():
    """The clients applied steps that the server has lost. They do not repeat those uploads."""
    exchange = Fragile()
    exchange.rounds(3)
    exchange.kill_server()
    exchange.everybody_joins()
    assert exchange.server.activations == [3, 3, 3]
    welcome = exchange.down[2][0]
    assert isinstance(welcome, Welcome)
    assert (welcome.iteration, welcome.activations, welcome.durable) == (0, (3, 3, 3), 0)
    exchange.rounds(2)
    assert exchange.server.activations == [5, 5, 5]
    assert exchange.server.iteration == 6


def test_an_upload_in_the_checkpoint_whose_answer_was_lost_is_given_up():
    exchange = Fragile()
    exchange.play(("wake", 0))
    exchange.server.receive(exchange.up[0].popleft())
    exchange.save_server()
    exchange.kill_server()
    exchange.join(0)
    _, skipped = exchange.down[0]
    assert isinstance(skipped, Skipped)
    assert "lost" in skipped.reason
    exchange.deliver()
    assert not exchange.clients[0].waiting
    assert exchange.clients[0].activation == 1


@pytest.mark.parametrize("rule", [{"name": "t-sync", "t": 2}, {"name": "sync"}, {"delay_bound": 1}])
def test_an_upload_that_waits_when_the_checkpoint_is_written_is_not_told_durable_and_not_lost(rule):
    """The server has not stepped on this upload. After a crash only its client can send it again."""
    exchange = Fragile(rule=rule)
    exchange.play(("wake", 0))
    exchange.play(("up", 0))
    assert (exchange.server.activations[0], exchange.server.uploads_done()) == (1, [0] * CLIENTS)
    exchange.save_server()
    assert exchange.server.made_durable(exchange.saved_server[1]) == []
    exchange.kill_server()
    exchange.everybody_joins()
    exchange.rounds(1)
    assert exchange.clients[0].applied >= 1
    assert exchange.server.iteration > 0
    assert exchange.skips == []


def test_an_upload_the_crash_undid_is_said_again():
    exchange = Fragile()
    exchange.play(("wake", 0))
    exchange.server.receive(exchange.up[0].popleft())
    exchange.kill_server()
    exchange.join(0)
    exchange.deliver()
    assert (exchange.server.iteration, exchange.server.activations[0]) == (1, 1)
    assert exchange.clients[0].applied == 1


def test_the_optimiser_and_the_head_go_on_as_if_nothing_had_happened():
    """Killed right after a checkpoint with no message in transit: the run continues bit for bit."""
    sections = {"optimiser": {"name": "Adam", "step_size": 0.1}, "model": {"head": "linear"}}
    whole, killed = Fragile(**sections), Fragile(**sections)
    for exchange in (whole, killed):
        exchange.rounds(3)
    killed.save_server()
    killed.kill_server()
    killed.everybody_joins()
    for exchange in (whole, killed):
        exchange.rounds(3)
    assert same(whole.server.head.state_dict(), killed.server.head.state_dict())
    assert whole.server.iteration == killed.server.iteration == 18


def test_clients_hear_what_a_checkpoint_holds_of_them():
    exchange = Fragile()
    for client in (0, 1, 0):
        exchange.turn(client)
    told = exchange.server.made_durable([2, 1, 0])
    assert [(type(m), m.client, m.activation) for m in told] == [(Durable, 0, 2), (Durable, 1, 1)]
    exchange.turn(0)
    assert [m.client for m in exchange.server.made_durable([3, 1, 0])] == [0]
    assert exchange.server.made_durable([3, 1, 0]) == []
    welcome, *_ = exchange.server.receive(exchange.clients[0].join())
    assert welcome.durable == 3


# --- a client is restored ---


def test_a_client_restored_to_an_older_state_gets_its_newer_cells_recalled():
    exchange = Fragile(schedule={"batch_size": 2})
    exchange.rounds(2)
    exchange.save_client(1)
    iteration = exchange.clients[1].iteration
    exchange.rounds(2)
    newer = exchange.server.table.stored_at[:, 1] >= iteration
    exchange.kill_client(1)
    exchange.join(1)
    assert requested(exchange, 1) == newer.nonzero()[0].tolist() != []
    exchange.deliver()
    client, table = exchange.clients[1], exchange.server.table
    assert client.activation == 4, "it goes on where the server stands"
    rows = newer.nonzero()[0]
    found = table.column(1)[rows]
    assert np.array_equal(found, client.model(client._features[rows]).detach().numpy())
    assert all(maker not in exchange.dead for maker in exchange.makers.values())


def test_a_client_that_only_lost_its_connection_is_asked_for_nothing():
    exchange = Fragile(schedule={"refresh": "all"})
    exchange.rounds(3)
    exchange.play(("wake", 1))
    exchange.leave(1)
    exchange.join(1)
    assert requested(exchange, 1) == []


def test_a_client_that_lost_everything_says_every_row_again_and_goes_on():
    exchange = Fragile(schedule={"refresh": "all"})
    exchange.rounds(3)
    exchange.kill_client(2)
    assert exchange.clients[2].join().activation == 0
    exchange.join(2)
    assert requested(exchange, 2) == list(range(9))
    exchange.rounds(1)
    assert exchange.server.activations == [4, 4, 4]


def test_held_out_rows_that_were_lost_are_asked_for_apart_from_training_rows():
    """Another model embeds them, so one message must not ask for both. Rows from 4 on are held out."""
    server = run_of(DATA).runtime.server
    server._training_rows = 4
    server.receive(Refresh(0, 0, np.arange(6), np.ones((6, 3), np.float32)))
    server.restore(0, [0, 0, 0], server.descent.state(), forgettable=0)
    _, request = server.receive(Join(0))
    assert isinstance(request, Request)
    (evaluate,) = server.receive(Refresh(0, 0, request.rows, np.ones((4, 3), np.float32), request.number))
    assert isinstance(evaluate, Evaluate)
    assert (request.rows.tolist(), evaluate.rows.tolist(), evaluate.best) == ([0, 1, 2, 3], [4, 5], -1)
    assert server.receive(Refresh(0, 1, evaluate.rows, np.ones((2, 3), np.float32), evaluate.number)) == []
    assert not len(server.table.lost(0))


def test_turns_and_answers_of_a_forgotten_upload_are_dropped():
    """Client 0's upload waits for a second client. Client 0 rejoins without remembering it."""
    server = run_of(DATA, rule={"name": "t-sync", "t": 2}).runtime.server
    server.receive(Upload(0, 0, 0, np.array([1]), np.ones((1, 3), np.float32)))
    welcome, *_ = server.receive(Join(0))
    assert welcome.activations[0] == 1
    assert server.receive(Upload(1, 0, 0, np.array([2]), np.ones((1, 3), np.float32))) == []
    replies = server.receive(Upload(0, 0, 1, np.array([3]), np.ones((1, 3), np.float32)))
    assert [(reply.client, reply.activation) for reply in replies] == [(1, 0), (0, 1)]
    assert all(isinstance(reply, Gradient) for reply in replies)


# --- any party is restored, at any time ---


def with_one_in_flight_where_it_must_be(rule):
    one = rule["name"] == "sync" or rule["order"] == "query-first"
    return {**rule, "window": 1} if one else rule


rules = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["async", "t-sync", "sync"]),
        "t": st.integers(1, CLIENTS),
        "delay_bound": st.sampled_from([0, 1, 4]),
        "when_unanswered": st.sampled_from(["wait", "skip"]),
        "order": st.sampled_from(["upload-first", "query-first"]),
        "window": st.integers(1, 3),
    }
).map(with_one_in_flight_where_it_must_be)
refreshes = st.sampled_from(["none", "random:2", "all", "lookahead"])
histories = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=20, max_size=80)


def live(exchange, history):
    """Crashes, checkpoints and broken connections of any party, at any moment."""
    for choice, upheaval in history:
        what, i = divmod(upheaval, CLIENTS)
        if what == 0:
            (exchange.join if i in exchange.server.absent else exchange.leave)(i)
        elif what == 1:
            exchange.save_client(i)
        elif what == 2:
            exchange.kill_client(i)
        elif what == 3:
            (exchange.save_server, exchange.kill_server, exchange.everybody_joins)[i]()
        if moves := exchange.moves():
            exchange.play(moves[choice % len(moves)])


@given(rules, refreshes, histories)
def test_whoever_crashes_nobody_breaks_a_rule_and_the_run_goes_on(rule, refresh, history):
    exchange = Fragile(rule=rule, schedule={"refresh": refresh})
    live(exchange, history)
    exchange.everybody_joins()
    exchange.deliver()
    before = exchange.server.iteration
    exchange.rounds(5)
    assert exchange.server.iteration >= before + 2
    assert not any(exchange.server.requests.of(client.index) for client in exchange.clients)
    if rule["name"] == "sync":
        activations = [client.activation for client in exchange.clients]
        assert max(activations) - min(activations) <= 1, "all are in one round again"
    if rule["delay_bound"]:
        assert exchange.seen.largest() <= rule["delay_bound"]


TURN, KILL = ("turn", 0), ("kill", 0)
SAVED_BEFORE_THE_SERVER_WENT_BACK = [  # the checkpoint names an iteration that the server has lost
    *[TURN, TURN, ("save", 0), TURN, ("kill server", 0), ("turn", 1), KILL]
]
KILLED_BEFORE_THE_RECALL_WAS_HEARD = [TURN, TURN, TURN, KILL, TURN, ("save", 0), KILL, TURN, KILL, TURN]


@pytest.mark.parametrize("heard_at_once", [True, False])
@given(
    st.sampled_from(["async", "t-sync", "sync"]),
    st.sampled_from(["upload-first", "query-first"]),
    refreshes,
    st.lists(
        st.tuples(
            st.sampled_from(["turn", "turn", "turn", "play", "save", "kill", "save server", "kill server"]),
            st.integers(0, CLIENTS - 1),
        ),
        min_size=10,
        max_size=40,
    ),
)
@example("async", "upload-first", "none", KILLED_BEFORE_THE_RECALL_WAS_HEARD)
@example("async", "upload-first", "none", SAVED_BEFORE_THE_SERVER_WENT_BACK)
def test_no_cell_of_a_model_that_is_lost_stays_in_the_table(heard_at_once, name, order, refresh, history):
    """Any party may be killed at any time. After recovery, all cells come from models that still exist."""
    rule = with_one_in_flight_where_it_must_be({"name": name, "t": 2, "window": 2, "order": order})
    exchange = Fragile(rule=rule, schedule={"refresh": refresh})
    for what, i in history:
        if what == "save":
            exchange.save_client(i)
        elif what == "kill":
            exchange.kill_client(i)
            exchange.join(i)
        elif what == "save server":
            exchange.save_server()
        elif what == "kill server":
            exchange.kill_server()
            exchange.everybody_joins()
        elif what == "turn" and exchange.here[i] and not exchange.clients[i].waiting:
            exchange.turn(i)
            assert not set(exchange.makers.values()) & exchange.dead
        elif moves := [move for move in exchange.moves() if move[1] == i]:
            exchange.play(moves[0])
        if heard_at_once and "kill" in what:
            exchange.deliver()
    exchange.deliver()
    assert not set(exchange.makers.values()) & exchange.dead


def test_sync_clients_that_stand_at_different_rounds_meet_in_the_newest():
    exchange = Fragile(rule={"name": "sync"})
    exchange.rounds(2)
    exchange.save_client(2)
    exchange.save_server()
    exchange.rounds(3)
    exchange.kill_client(2)
    exchange.kill_server()
    exchange.everybody_joins()
    assert exchange.server.activations == [5, 5, 2]
    exchange.rounds(1)
    skipped_until = exchange.server.iteration
    exchange.rounds(5)
    assert {client.activation for client in exchange.clients} == {exchange.clients[0].activation}
    assert exchange.server.iteration > skipped_until
    assert exchange.seen.largest() == 0


# --- a connection that breaks during a recovery ---


@pytest.mark.parametrize("who", ["server", "client"])
def test_what_was_lost_is_asked_for_until_it_was_said(who):
    exchange = Fragile(schedule={"refresh": "all"})
    exchange.rounds(3)
    if who == "server":
        exchange.kill_server()
    else:
        exchange.kill_client(0)
    exchange.join(0)
    rows = requested(exchange, 0)
    assert rows == list(range(9))
    exchange.play(("down", 0))  # Welcome arrives, the request does not
    exchange.leave(0)
    exchange.join(0)
    assert requested(exchange, 0) == rows


@pytest.mark.parametrize("who", ["server", "client"])
def test_what_was_lost_is_asked_for_after_another_crash_of_the_server(who):
    exchange = Fragile(schedule={"refresh": "all"})
    exchange.rounds(3)
    if who == "client":
        exchange.save_server()
        exchange.kill_client(0)
        exchange.join(0)
        exchange.play(("down", 0))  # it continues from Welcome, so its next Join does not show what it lost
    exchange.kill_server()
    exchange.kill_server()
    exchange.join(0)
    assert requested(exchange, 0) == list(range(9))
    exchange.deliver()
    assert not exchange.server.table.lost(0).size
