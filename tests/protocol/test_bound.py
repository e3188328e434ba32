import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.federation import Exchange, run_of, vertical_data
from vafl.protocol.bound import DelayBound
from vafl.protocol.messages import Decline, Gradient, Join, Leave, Request, Skipped, Upload, Welcome
from vafl.protocol.requests import Requests
from vafl.protocol.rules import Turn
from vafl.protocol.table import FOREVER, EmbeddingTable

CLIENTS = 3
DATA = vertical_data(rows=9, clients=CLIENTS, shape=(2,))


def with_one_in_flight_where_it_must_be(rule):
    """Sync rounds and the query-first order have one upload in flight."""
    one = rule["name"] == "sync" or rule["order"] == "query-first"
    return {**rule, "window": 1} if one else rule


settings = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["async", "t-sync", "sync"]),
        "t": st.integers(1, CLIENTS),
        "delay_bound": st.integers(1, 5),
        "when_unanswered": st.sampled_from(["wait", "skip", "use"]),
        "order": st.sampled_from(["upload-first", "query-first"]),
        "start": st.sampled_from(["zeros", "upload"]),
        "window": st.integers(1, 3),
    }
).map(with_one_in_flight_where_it_must_be)
schedules = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["epochs", "iid"]),
        "refresh": st.sampled_from(["none", "random:2", "all", "lookahead"]),
        "batch_size": st.integers(1, 4),
    }
)
choices = st.lists(st.integers(0, 11), min_size=20, max_size=90)


@given(settings, schedules, choices)
def test_no_step_ever_uses_a_cell_older_than_the_bound(rule, schedule, order):
    exchange = Exchange(run_of(DATA, rule=rule, schedule=schedule))
    for choice in order:
        moves = exchange.moves()
        assert moves, f"deadlock: the server waits for {exchange.server.waiting_for()}"
        exchange.play(moves[choice % len(moves)])
    assert exchange.seen.largest() <= rule["delay_bound"]
    assert all(summary.over_bound == 0 for summary in exchange.seen.summaries())


@given(
    settings, schedules, st.lists(st.tuples(st.integers(0, 11), st.integers(0, 15)), min_size=20, max_size=90)
)
def test_the_bound_holds_while_clients_come_and_go(rule, schedule, order):
    exchange = Exchange(run_of(DATA, rule=rule, schedule=schedule))
    for choice, upheaval in order:
        if upheaval < CLIENTS:  # a client leaves, or an absent one joins
            gone = upheaval in exchange.server.absent
            (exchange.join if gone else exchange.leave)(upheaval)
        moves = exchange.moves()
        assert moves or exchange.server.absent, exchange.server.waiting_for()
        if moves:
            exchange.play(moves[choice % len(moves)])
    over = [(delays > rule["delay_bound"]).any() for delays, _ in exchange.seen.used]
    reported = sum(summary.over_bound for summary in exchange.seen.summaries())
    assert reported == sum(
        int((delays[:, client] > rule["delay_bound"]).sum())
        for delays, own in exchange.seen.used
        for client in range(CLIENTS)
        if client != own
    )
    assert rule["when_unanswered"] == "use" or not any(over)


@given(settings, schedules, choices)
def test_everybody_gets_on_once_all_are_back(rule, schedule, order):
    """After any drop-outs, once all clients are present and messages are delivered, steps continue."""
    exchange = Exchange(run_of(DATA, rule=rule, schedule=schedule))
    for choice in order:
        if choice < 2:
            (exchange.join if choice in exchange.server.absent else exchange.leave)(choice)
        if moves := exchange.moves():
            exchange.play(moves[choice % len(moves)])
    for client in sorted(exchange.server.absent):
        exchange.join(client)
    before = exchange.server.iteration
    for _ in range(4):
        exchange.deliver()
        for client in exchange.clients:
            if not client.waiting:
                exchange.turn(client.index)
    assert exchange.server.iteration >= before + 2


def bounded(policy, **rule):
    """An async server with D = 1: client 1's cells have delay 2 when client 0 uploads next."""
    rule = {"delay_bound": 1, "when_unanswered": policy, **rule}
    exchange = Exchange(run_of(vertical_data(rows=3, shape=(2,)), rule=rule, schedule={"batch_size": 3}))
    exchange.turn(1)
    exchange.turn(0)
    return exchange


def asked(exchange):
    """Client 0 uploads; return the resulting request to client 1 without delivering it."""
    exchange.play(("wake", 0))
    exchange.play(("up", 0))
    return exchange.down[1].popleft()


def test_a_stale_cell_is_asked_for_and_the_step_waits():
    exchange = bounded("wait")
    before = exchange.server.iteration
    request = asked(exchange)
    assert isinstance(request, Request)
    assert request.rows.tolist() == [0, 1, 2]
    assert exchange.server.iteration == before
    assert "fresh embeddings from clients [1]" in exchange.server.waiting_for()
    (answer,) = exchange.clients[1].receive(request)
    assert answer.request == request.number
    (reply,) = exchange.server.receive(answer)
    assert isinstance(reply, Gradient)
    assert exchange.server.iteration == before + 1


def test_a_client_is_asked_once_while_it_has_not_answered():
    exchange = bounded("wait")
    first = asked(exchange)
    exchange.play(("wake", 1))
    exchange.play(("up", 1))  # its upload makes the cells fresh, but the request stays open
    assert exchange.server.bound.asked == {1: first.number}
    assert exchange.server.requests.of(1) == [first]
    assert not exchange.down[1]


def decline(exchange, request):
    sequence = exchange.clients[1].sender.number()
    return exchange.server.receive(Decline(1, sequence, request.number, "out of budget"))


def test_a_declined_step_waits_and_the_run_is_over():
    """A spent budget stays spent, unless a client with another budget joins."""
    exchange = bounded("wait")
    assert not exchange.server.over
    assert decline(exchange, asked(exchange)) == []
    assert "fresh embeddings from clients [1]" in exchange.server.waiting_for()
    assert exchange.server.over
    exchange.server.receive(Leave(1))
    assert not exchange.server.over


def test_a_declined_step_is_skipped():
    exchange = bounded("skip")
    before = exchange.server.iteration
    (reply,) = decline(exchange, asked(exchange))
    assert isinstance(reply, Skipped)
    assert "no fresh embeddings from clients [1] within delay bound 1" in reply.reason
    assert exchange.server.iteration == before
    exchange.down[0].append(reply)
    exchange.deliver()
    assert not exchange.clients[0].waiting
    assert isinstance(asked(exchange), Request), "the next step asks anew"


def test_when_nothing_but_skips_has_come_of_two_epochs_the_run_is_over():
    """The clients asked are present and decline. Only a client that joins can change that."""
    exchange = bounded("skip")
    while exchange.server.bound.skipped_rows < 2 * exchange.server.table.stored_at.size:
        assert not exchange.server.over
        (reply,) = decline(exchange, asked(exchange))
        exchange.down[0].append(reply)
        exchange.play(("down", 0))
    assert exchange.server.over
    exchange.server.receive(Leave(1))
    assert not exchange.server.over


def test_a_declined_step_uses_the_stale_cell_and_reports_it():
    exchange = bounded("use")
    (reply,) = decline(exchange, asked(exchange))
    assert isinstance(reply, Gradient)
    summary = exchange.server.delays.summaries()[1]
    assert (summary.over_bound, summary.max) == (3, 2)


@pytest.mark.parametrize(("policy", "kind"), [("skip", Skipped), ("use", Gradient)])
def test_a_client_that_leaves_while_asked_counts_as_unanswered(policy, kind):
    exchange = bounded(policy)
    asked(exchange)
    exchange.leave(1)
    (reply,) = exchange.down[0]
    assert isinstance(reply, kind)


def test_a_step_that_waits_for_an_absent_client_says_so():
    exchange = bounded("wait")
    exchange.leave(1)
    exchange.play(("wake", 0))
    exchange.play(("up", 0))
    assert "fresh embeddings from clients [1] (delay bound); gone: [1]" in exchange.server.waiting_for()


def test_a_client_that_comes_back_is_asked_again():
    exchange = bounded("wait")
    asked(exchange)
    exchange.leave(1)
    exchange.join(1)
    welcome, request = exchange.down[1]
    assert isinstance(welcome, Welcome)
    assert isinstance(request, Request)
    assert exchange.server.requests.of(1) == [request], "the question before is forgotten"
    exchange.deliver()
    assert not exchange.clients[0].waiting


def test_a_client_that_declined_and_comes_back_is_asked_again():
    exchange = bounded("wait")
    decline(exchange, asked(exchange))
    exchange.leave(1)
    exchange.join(1)
    _, request = exchange.down[1]
    assert isinstance(request, Request)


def test_a_step_that_waits_is_not_overtaken():
    """While a query waits for fresh cells, further uploads must not make its cells stale again."""
    rule = {"delay_bound": 1, "order": "query-first"}
    exchange = Exchange(run_of(DATA, rule=rule, schedule={"batch_size": 9}))
    for client in (2, 0, 1):
        exchange.turn(client)
    exchange.play(("wake", 0))
    exchange.play(("up", 0))
    (request,) = exchange.down[0]  # the rows of the query are the stale ones
    server, iteration = exchange.server, exchange.server.iteration
    upload = Upload(1, 100, 1, np.arange(9), np.ones((9, 3), np.float32), answer=False)
    assert server.receive(upload) == []
    answer, *_ = server.receive(exchange.clients[0].receive(request)[0])
    assert isinstance(answer, Gradient)
    assert (answer.client, answer.iteration) == (0, iteration)
    assert server.iteration == iteration + 1, "the upload had its turn after the query"


def test_a_decline_does_not_outlive_the_step_it_was_for():
    """Client 1 declines for client 0's step. Client 0 rejoins without its state; client 1 is asked again."""
    exchange = bounded("wait")
    decline(exchange, asked(exchange))
    exchange.leave(0)
    assert exchange.server.bound.declined == {1}, "the upload was taken: its step still waits"
    exchange.server.receive(Join(0))
    assert exchange.server.bound.declined == set()
    message = Upload(0, 0, 2, np.arange(3), np.zeros((3, 3), np.float32))
    (request,) = exchange.server.receive(message)
    assert isinstance(request, Request)
    assert request.client == 1


def test_what_waits_for_fresh_cells_waits_on_while_its_client_is_away():
    exchange = bounded("wait")
    request, before = asked(exchange), exchange.server.iteration
    exchange.leave(0)
    (answer,) = exchange.clients[1].receive(request)
    (gradient,) = exchange.server.receive(answer)
    assert (gradient.client, exchange.server.iteration) == (0, before + 1)
    exchange.join(0)
    _, again = exchange.down[0]
    assert again is gradient


def test_only_the_turns_that_need_a_missing_row_are_skipped():
    bound = DelayBound(1, "skip")
    turns = [Turn(0, 0, np.array([0, 1]), True, True), Turn(1, 0, np.array([2]), True, True)]
    assert bound.to_skip(turns, {2: np.array([1])}) == turns[:1]
    assert bound.to_skip(turns, {}) == []
    assert DelayBound(1, "use").to_skip(turns, {2: np.array([1])}) == []


def test_stale_names_each_row_once_and_only_clients_that_have_one():
    table = EmbeddingTable(4, [1] * CLIENTS, summed=False)
    for client in range(2):
        table.store(client, np.arange(4), np.zeros((4, 1), np.float32), 0)
    table.store(0, np.array([3]), np.zeros((1, 1), np.float32), 3)
    stale = DelayBound(2).stale(table, np.array([3, 1, 3, 1]), 3)
    assert {client: rows.tolist() for client, rows in stale.items()} == {0: [1], 1: [1, 3], 2: [1, 3]}
    assert DelayBound(3).stale(table, np.array([3, 1]), 3).keys() == {2}
    assert DelayBound(FOREVER + 3).stale(table, np.array([3, 1]), 3) == {}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.booleans()), max_size=12))
def test_only_the_answer_to_what_the_step_asked_settles_it(answers):
    """The step waits for requests 0 and 1. Other requests, such as an evaluation's, do not affect it."""
    bound, requests = DelayBound(1), Requests()
    bound.ask({0: np.array([2]), 1: np.array([3])}, set(), requests)
    asked, declined = {0: 0, 1: 1}, set()
    for client, number, no in answers:
        bound.note_answer(client, number, declined=no)
        if client == number and asked.pop(client, None) is not None and no:
            declined.add(client)
        assert (bound.asked, bound.declined) == (asked, declined)
        assert bound.must_wait({}) == bool(asked)


def test_who_is_gone_has_declined_or_was_asked_is_not_asked():
    bound, requests = DelayBound(1), Requests()
    stale = {client: np.array([client]) for client in range(4)}
    bound.declined.add(2)
    made = bound.ask(stale, {1}, requests)
    assert [(request.client, request.rows.tolist()) for request in made] == [(0, [0]), (3, [3])]
    assert bound.ask(stale, {1}, requests) == []
    bound.forget(0)
    bound.begin_step()
    assert [request.client for request in bound.ask(stale, {1}, requests)] == [0, 2]
