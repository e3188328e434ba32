import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st

from tests.federation import Exchange, parameters, run_of, same, snapshot, vertical_data
from vafl.errors import Diverged
from vafl.protocol.messages import Gradient, Leave, Query, Refresh, Upload, Welcome
from vafl.run.assembly import build

CLIENTS = 3
DATA = vertical_data(rows=10, clients=CLIENTS, shape=(2,))
ETA = 0.2

rules = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["async", "t-sync", "sync"]),
        "t": st.integers(1, CLIENTS),
        "delay_bound": st.integers(0, 4),
        "when_unanswered": st.sampled_from(["skip", "use"]),
        "order": st.sampled_from(["upload-first", "query-first"]),
    }
)
models = st.sampled_from(
    [
        {"head": "bias"},
        {"head": "linear", "combine": "sum", "width": 4},
        {"head": "mlp", "combine": "concat", "width": 2, "head_hidden": [3]},
    ]
)


class KeySigner(Exchange):
    """Recomputes every answer and every head step from the table, and compares."""

    def __init__(self, run):
        super().__init__(run)
        self.heads, self.answers, self.checked = {}, [], set()
        step = self.server.descent.step

        def remember_then_step(gradients, iteration):
            self.heads[iteration] = copy.deepcopy(self.server.head)
            step(gradients, iteration)

        self.server.descent.step = remember_then_step

    def _dispatch(self, replies):
        """An answer repeated after a join is the same object, which was checked when it was created."""
        answers = [reply for reply in replies if isinstance(reply, Gradient) and reply not in self.checked]
        self.checked |= set(answers)
        for answer in answers:
            rows = self.clients[answer.client]._flights[answer.activation].rows
            expected, _ = self.expected(rows, self.heads.get(answer.iteration, self.server.head))
            own = self.server.table.columns[answer.client]
            expected = expected if self.server.table.sums is not None else expected[:, own]
            assert np.allclose(answer.gradients, expected.numpy(), atol=1e-6)
        super()._dispatch(replies)
        self.answers = answers

    def expected(self, rows, head):
        """Return the gradients of the mean loss at these rows w.r.t. the head's inputs and its parameters."""
        inputs = torch.from_numpy(self.server.table.read(rows)).requires_grad_()
        loss = F.cross_entropy(head(inputs), self.run.data.labels[rows])
        first, *rest = torch.autograd.grad(loss, [inputs, *head.parameters()])
        return first, rest


@given(rules, models, st.lists(st.integers(0, 23), min_size=20, max_size=80))
def test_every_answer_is_the_gradient_of_the_clients_own_mean_loss(rule, model, order):
    exchange = KeySigner(run_of(DATA, rule=rule, model=model))
    for choice in order:
        if choice < 2:
            (exchange.join if choice in exchange.server.absent else exchange.leave)(choice)
        if moves := exchange.moves():
            exchange.play(moves[choice % len(moves)])


@given(st.integers(1, CLIENTS), models, st.lists(st.integers(0, 11), min_size=10, max_size=60))
def test_t_sync_steps_on_t_different_clients_by_the_mean_over_them(t, model, order):
    exchange = KeySigner(run_of(DATA, rule={"name": "t-sync", "t": t}, model=model))
    server = exchange.server
    for choice in order:
        before, table = server.iteration, server.table
        moves = exchange.moves()
        what, client = moves[choice % len(moves)]
        flights = {c.index: dict(c._flights) for c in exchange.clients}
        exchange.play((what, client))
        assert server.iteration - before in (0, 1)
        if server.iteration == before:
            continue
        stepped = [answer.client for answer in exchange.answers]
        assert len(set(stepped)) == len(stepped) == t
        head = exchange.heads[before]
        rows = [flights[answer.client][answer.activation].rows for answer in exchange.answers]
        moved = [exchange.expected(own, head)[1] for own in rows]
        for now, old, *gradients in zip(server.head.parameters(), head.parameters(), *moved, strict=True):
            assert torch.allclose(now, old - ETA * torch.stack(gradients).mean(0), atol=1e-6)
        assert table is server.table


@pytest.mark.parametrize("order", ["upload-first", "query-first"])
@pytest.mark.parametrize("refresh", ["none", "lookahead"])
def test_t_of_one_is_async_bit_by_bit(order, refresh):
    ends = []
    for rule in ({"name": "async"}, {"name": "t-sync", "t": 1}):
        run = run_of(DATA, rule={**rule, "order": order}, schedule={"refresh": refresh}, stop={"updates": 60})
        ends.append((run.train(), parameters(run), run.delays()))
    assert same(*ends)


@pytest.mark.parametrize("t", [1, 2, 3])
def test_t_sync_waits_for_the_t_th_client(t):
    exchange = Exchange(run_of(DATA, rule={"name": "t-sync", "t": t}))
    for client in range(CLIENTS):
        exchange.play(("wake", client))
    for client in range(t - 1):
        exchange.play(("up", client))
        assert exchange.server.iteration == 0
    assert t == 1 or f"uploads of {t} different clients; it has those of" in exchange.server.waiting_for()
    exchange.play(("up", t - 1))
    assert exchange.server.iteration == 1


def test_a_second_upload_of_one_client_does_not_count_twice():
    run = run_of(DATA, rule={"name": "t-sync", "t": 2})
    server, client = run.runtime.server, run.runtime.clients[0]
    client.wake()
    for activation in range(2):  # as over a network, with a window of two messages in flight
        rows = np.array([activation])
        assert server.receive(Upload(0, activation, activation, rows, np.ones((1, 3), np.float32))) == []
    replies = server.receive(Upload(1, 0, 0, np.array([5]), np.ones((1, 3), np.float32)))
    assert [(reply.client, reply.activation) for reply in replies] == [(0, 0), (1, 0)]
    assert server.iteration == 1


@pytest.mark.parametrize(
    "model",
    [
        {"head": "bias"},
        {"head": "linear", "combine": "sum"},
        {"head": "linear", "combine": "concat"},
        {"head": "mlp", "combine": "sum"},
        {"head": "mlp", "combine": "concat"},
    ],
    ids=lambda model: "-".join(map(str, model.values())),
)
@pytest.mark.parametrize(
    "optimiser", [{}, {"name": "Adam", "step_size": 0.01}, {"options": {"momentum": 0.5}}], ids=str
)
@pytest.mark.parametrize("l2", [0.0, 0.05])
@pytest.mark.parametrize("order", ["upload-first"])
def test_sync_without_delay_is_centralised_block_descent(model, optimiser, l2, order):
    optimiser = {"step_size": 0.1, "l2": l2, "server_step_size": 0.07, **optimiser}
    sections = {"model": model, "optimiser": optimiser}
    if model["head"] == "mlp":
        sections["embedding"] = {"model": "mlp", "hidden": [5]}
    ends = []
    for name in ("sync", "centralised"):
        run = run_of(DATA, rule={"name": name, "order": order}, **sections)
        ends.append((parameters(run), run.train(), parameters(run)))
    assert same(ends[0][0], ends[1][0])
    assert not same(ends[0][0], ends[0][2])
    for distributed, central in zip(ends[0][2], ends[1][2], strict=True):
        assert torch.allclose(distributed, central, rtol=1e-4, atol=1e-5)
    assert ends[0][1][-1].train_loss == pytest.approx(ends[1][1][-1].train_loss, rel=1e-4)


def test_one_client_alone_is_centralised_under_every_rule():
    data = vertical_data(rows=10, clients=1)
    ends = []
    for name in ("async", "sync", "t-sync", "centralised"):
        run = run_of(data, rule={"name": name, "t": 1}, schedule={"batch_size": 10})
        run.train()
        ends.append(parameters(run))
    for end in ends[:-1]:
        for found, central in zip(end, ends[-1], strict=True):
            assert torch.allclose(found, central, rtol=1e-4, atol=1e-6)


def test_a_query_is_answered_without_a_step():
    exchange = Exchange(run_of(DATA, rule={"order": "query-first"}))
    exchange.turn(0)
    assert exchange.server.iteration == 1
    before = snapshot(exchange.server)["head"]
    (query,) = exchange.clients[0].wake()
    assert isinstance(query, Query)
    (answer,) = exchange.server.receive(query)
    assert isinstance(answer, Gradient)
    assert (answer.activation, exchange.server.iteration) == (0, 1)
    assert same(before, snapshot(exchange.server)["head"])


def test_a_sync_round_survives_a_client_that_comes_back_in_query_first_order():
    """A lost query must not block the others, and no client may get the gradient of other rows."""
    exchange = KeySigner(run_of(DATA, rule={"name": "sync", "order": "query-first"}))
    for client in range(CLIENTS):
        exchange.turn(client)
    exchange.leave(0)
    exchange.join(0)
    for _ in range(5):
        exchange.deliver()
        for client in exchange.clients:
            if not client.waiting:
                exchange.turn(client.index)
    assert exchange.server.iteration >= 4
    assert max(exchange.server.activations) - min(exchange.server.activations) <= 1


def test_counters_and_welcome_tell_where_the_run_stands():
    exchange = Exchange(run_of(DATA))
    for client in (0, 1, 0):
        exchange.turn(client)
    (welcome,) = exchange.server.receive(exchange.clients[2].join())
    assert isinstance(welcome, Welcome)
    assert (welcome.client, welcome.iteration, welcome.activations) == (2, 3, (2, 1, 0))


def test_what_a_client_uploaded_stays_when_it_leaves_and_counts():
    exchange = Exchange(run_of(DATA, rule={"name": "t-sync", "t": 2}))
    exchange.turn(0)
    cells = exchange.server.table.cells.copy()
    assert exchange.server.receive(Leave(0)) == []
    assert exchange.server.absent == {0}
    assert np.array_equal(exchange.server.table.cells, cells)
    assert "it has those of [0]; gone: [0]" in exchange.server.waiting_for()
    exchange.turn(1)
    assert exchange.server.iteration == 1
    before = parameters(exchange.run)
    exchange.join(0)
    exchange.deliver()
    assert not exchange.clients[0].waiting, "its answer was kept for it"
    assert not same(before, parameters(exchange.run))


def test_a_client_restarted_from_nothing_may_count_its_messages_from_the_start():
    """A restarted process has lost its sequence number. Join begins a new sequence."""
    run = run_of(DATA)
    exchange = Exchange(run)
    for _ in range(3):
        exchange.turn(0)
    exchange.leave(0)
    fresh = run_of(DATA).runtime.clients[0]
    exchange.clients[0] = fresh
    exchange.join(0)
    exchange.deliver()
    assert fresh.activation == 3
    exchange.turn(0)
    assert exchange.server.activations[0] == 4


def test_a_sync_round_is_completed_without_a_client_whose_upload_was_taken():
    exchange = Exchange(run_of(DATA, rule={"name": "sync"}))
    for client in range(CLIENTS):
        exchange.turn(client)
    exchange.turn(0)
    exchange.leave(0)
    assert exchange.server.activations == [2, 1, 1]
    for client in (1, 2):
        exchange.turn(client)
    assert exchange.server.iteration == 2
    exchange.join(0)
    exchange.deliver()
    assert exchange.clients[0].applied == 2
    for client in range(CLIENTS):
        exchange.turn(client)
    assert exchange.server.iteration == 3
    assert exchange.seen.largest() == 0


def test_a_sync_client_that_forgot_its_upload_says_it_again():
    exchange = Exchange(run_of(DATA, rule={"name": "sync"}))
    for client in range(CLIENTS):
        exchange.turn(client)
    exchange.turn(0)
    exchange.leave(0)
    exchange.clients[0] = run_of(DATA, rule={"name": "sync"}).runtime.clients[0]
    exchange.join(0)
    assert exchange.server.activations == [1, 1, 1], "the round is not over: it is uploaded anew"
    exchange.deliver()
    for client in range(CLIENTS):
        exchange.turn(client)
    assert exchange.server.iteration == 2
    assert exchange.server.activations == [2, 2, 2]
    assert exchange.seen.largest() == 0


def test_a_refresh_is_stored_and_not_answered():
    server = run_of(DATA).runtime.server
    assert server.receive(Refresh(1, 0, np.array([4, 2]), np.ones((2, 3), np.float32))) == []
    assert server.table.delays(np.array([2, 3]), 0)[:, 1].tolist()[0] == 0
    assert server.activations == [0, 0, 0]


def test_a_loss_that_is_not_finite_stops_the_run():
    data = vertical_data(rows=10, clients=2, classes=0)
    server = run_of(data).runtime.server
    with pytest.raises(Diverged, match=r"VFL-4011.*inf.*0"):
        server.receive(Upload(0, 0, 0, np.array([1]), np.full((1, 1), 3e38, np.float32)))


def test_a_gradient_that_is_not_finite_is_our_own_fault_not_the_clients():
    run = run_of(vertical_data(rows=10, clients=2, classes=0), model={"head": "linear", "width": 1})
    with torch.no_grad():
        run.head.weight.fill_(1e38)
    with pytest.raises(Diverged, match="VFL-4035"):
        run.runtime.server.receive(Upload(0, 0, 0, np.array([1]), np.full((1, 1), 1e-20, np.float32)))


def test_the_last_batch_of_an_epoch_may_be_shorter_than_the_others_in_a_group():
    run = run_of(DATA, rule={"name": "t-sync", "t": 2})
    server = run.runtime.server
    server.receive(Upload(0, 0, 0, np.array([1, 2, 3]), np.ones((3, 3), np.float32)))
    first, second = server.receive(Upload(1, 0, 0, np.array([4]), np.ones((1, 3), np.float32)))
    assert (first.gradients.shape, second.gradients.shape) == ((3, 3), (1, 3))


def test_the_seed_decides_everything():
    config = run_of(DATA).config
    one, again, other = (build(replace(config, seed=seed), DATA) for seed in (5, 5, 6))
    for run in (one, again, other):
        run.train()
    assert same(parameters(one), parameters(again))
    assert not same(parameters(one), parameters(other))
