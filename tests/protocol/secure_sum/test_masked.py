"""The secure sum makes the steps of plain sync, reveals no single score, and loses no round."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.federation import Exchange, parameters, run_of, same, snapshot, vertical_data
from vafl.errors import InvalidMessage
from vafl.protocol.messages import (
    Decline,
    Evaluate,
    Gradient,
    Join,
    Keys,
    Leave,
    MaskedRefresh,
    MaskedUpload,
    Offer,
    Refresh,
    Rekey,
    Request,
    Skipped,
    Upload,
)
from vafl.protocol.prediction_client import embed
from vafl.protocol.secure_sum.fixed_point import decode, encode
from vafl.run.assembly import make_client, make_schedule, make_server, make_table
from vafl.run.plan import make_plan

ROWS, HELD_OUT = 20, 10


def run(clients=3, secure=True, **sections):
    privacy = {"secure_sum": secure, **sections.pop("privacy", {})}
    return run_of(
        vertical_data(rows=ROWS, clients=clients), rule={"name": "sync"}, privacy=privacy, **sections
    )


def batch_of(run, activation):
    """Return the rows that all clients upload in this round."""
    return make_schedule(run.config, ROWS, 0).batch(activation)


class Heard(Exchange):
    """An exchange that records the words the server received and the scores of the clients."""

    def __init__(self, made):
        super().__init__(made)
        self.got, self.scores = [], []

    def play(self, move):
        what, index = move
        if what == "up":
            self.got.append(self.up[index][0])
        if what == "wake":
            client = self.clients[index]
            features, rows = self.run.data.parties[index].features, batch_of(self.run, client.activation)
            self.scores.append(embed(client.model, features, rows).numpy())
        super().play(move)


def train(exchange, updates):
    while exchange.server.iteration < updates:
        exchange.play(exchange.moves()[0])
    exchange.deliver()


@pytest.mark.parametrize("clients", [3, 4, 6])
@pytest.mark.parametrize("classes", [0, 2, 3])
def test_it_ends_where_plain_sync_ends(clients, classes):
    def made(secure):
        data = vertical_data(rows=ROWS, clients=clients, classes=classes)
        sections = {"optimiser": {"step_size": 0.02}, "stop": {"updates": 50}}
        return run_of(data, rule={"name": "sync"}, privacy={"secure_sum": secure}, **sections)

    plain, secure = made(False), made(True)
    points, masked_points = plain.train(), secure.train()
    for one, other in zip(parameters(plain), parameters(secure), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert masked_points[-1].metric == pytest.approx(points[-1].metric, abs=1e-6)
    assert [summary.max for summary in secure.delays()] == [0] * clients


def test_the_server_gets_nothing_but_masked_words():
    exchange = Heard(run())
    train(exchange, 10)
    kinds = {type(message) for message in exchange.got}
    assert kinds == {Offer, MaskedUpload}
    plain = {words.tobytes() for scores in exchange.scores for words in encode(scores, 3)}
    uploads = [message for message in exchange.got if isinstance(message, MaskedUpload)]
    assert len(uploads) >= 30
    for upload in uploads:
        assert not plain & {line.tobytes() for line in upload.words}
        sizes = np.sort(np.abs(decode(upload.words)), axis=None)
        assert sizes[0] > 0  # words spread over the whole range of 64 bits,
        assert sizes[(len(sizes) - 1) // 2] > 1e8  # far larger than any score


def test_the_table_holds_the_sums_and_no_column_of_any_client():
    exchange = Exchange(run())
    rows, table = batch_of(exchange.run, 0), exchange.server.table
    expected = scores(exchange, rows)
    train(exchange, 1)
    assert table.cells.shape == (ROWS, 1, 3)
    np.testing.assert_allclose(table.cells[rows, 0], expected.numpy(), rtol=0, atol=1e-6)
    assert not exchange.server.sums.unsummed, "words are forgotten once they are summed"


@given(st.data())
def test_whoever_comes_and_goes_no_round_is_lost(data):
    """Any history of arrivals, drop-outs and returns makes the steps of an undisturbed run."""
    exchange = Heard(run())
    for _ in range(data.draw(st.integers(20, 80))):
        moves = [*exchange.moves(), ("leave", 0), ("leave", 1), ("join", 0), ("join", 1), ("join", 2)]
        what, index = data.draw(st.sampled_from(moves))
        if what in ("leave", "join"):
            getattr(exchange, what)(index)
        else:
            exchange.play((what, index))
    for index, here in enumerate(exchange.here):
        if not here:
            exchange.join(index)
    exchange.deliver()
    updates = exchange.server.iteration + 3
    train(exchange, updates)
    plain = Exchange(run(secure=False))
    train(plain, exchange.server.iteration)
    for one, other in zip(parameters(plain.run), parameters(exchange.run), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not [message for message in exchange.got if isinstance(message, Upload | Refresh)]
    _no_mask_serves_twice(exchange.got)


def _no_mask_serves_twice(got):
    """Uploads of one client in one epoch belong to different rounds. A repeated upload has new masks."""
    uploads = [message for message in got if isinstance(message, MaskedUpload)]
    offers = [message.offer for message in got if isinstance(message, Offer)]
    assert len(set(offers)) == len(offers)
    lines = [line.tobytes() for upload in uploads for line in upload.words]
    assert len(set(lines)) == len(lines)


def joined(exchange):
    for index in range(len(exchange.clients)):
        exchange.join(index)
    exchange.deliver()
    return exchange.server


def test_a_drop_out_aborts_the_round_and_begins_an_epoch():
    exchange = Exchange(run())
    server = joined(exchange)
    epoch = server.sums.key_epochs.number
    for index in (0, 1):
        exchange.play(("wake", index))
    exchange.deliver()
    assert server.activations == [1, 1, 0]
    replies = server.receive(Leave(2))
    assert [(type(reply), reply.client, reply.epoch) for reply in replies] == [
        (Rekey, 0, epoch + 1),
        (Rekey, 1, epoch + 1),
    ]
    assert "client 2 left" in replies[0].reason
    assert (server.activations, server.sums.unsummed, server._waiting) == ([0, 0, 0], set(), [])
    assert "keys of clients [0, 1, 2]" in server.waiting_for()


def test_an_evaluation_is_summed_and_asked_again_after_a_drop_out():
    exchange, held_out = with_held_out(), np.arange(ROWS, ROWS + HELD_OUT)
    server = joined(exchange)
    poll = server.poll(held_out)
    asked = poll.requests
    assert [request.client for request in asked] == [0, 1, 2]
    assert len({request.number for request in asked}) == 1
    first = exchange.clients[0].receive(asked[0])
    assert isinstance(first[0], MaskedRefresh)
    server.receive(first[0])
    exchange.leave(1)
    assert poll.is_open
    exchange.join(1)
    exchange.deliver()
    assert not poll.is_open
    assert poll.answered == {0, 1, 2}
    np.testing.assert_allclose(
        server.table.read(held_out), scores(exchange, held_out).numpy(), rtol=1.3e-6, atol=1e-5
    )


def test_nobody_is_asked_while_a_client_is_gone():
    exchange = Exchange(run())
    server = joined(exchange)
    exchange.leave(1)
    assert not server.may_poll


def test_a_sum_that_is_given_up_is_void_and_late_parts_of_it_are_no_fault():
    exchange = with_held_out()
    server = joined(exchange)
    rows, before = np.arange(ROWS, ROWS + 2), server.table.cells.copy()
    poll = server.poll(rows)
    answers = [exchange.clients[request.client].receive(request)[0] for request in poll.requests]
    server.receive(answers[0])
    assert server.expire(list(server.open_requests)) == []
    assert not poll.is_open
    assert poll.answered == set()
    for answer in answers[1:]:
        assert server.receive(answer) == []
    assert np.array_equal(server.table.cells, before)


def test_a_client_that_declines_ends_the_question_and_the_others_answers_are_no_fault():
    """All clients run out of budget at the same time, and each declines without knowing of the others."""
    exchange = with_held_out()
    server = joined(exchange)
    rows, before = np.arange(ROWS, ROWS + 2), server.table.cells.copy()
    first_poll = server.poll(rows)
    first = first_poll.requests
    answers = [exchange.clients[request.client].receive(request)[0] for request in first]
    server.receive(answers[0])
    server.receive(Decline(1, answers[1].sequence, first[1].number, "the budget is spent"))
    assert not first_poll.is_open
    assert server.receive(answers[2]) == []
    second_poll = server.poll(rows)
    second = second_poll.requests
    late = Decline(2, exchange.clients[2].sender.number(), first[2].number, "so is mine")
    assert server.receive(late) == []
    answers = [exchange.clients[request.client].receive(request)[0] for request in second]
    assert np.array_equal(server.table.cells, before)
    assert second_poll.is_open
    for answer in answers:
        server.receive(answer)
    assert not second_poll.is_open
    np.testing.assert_allclose(
        server.table.read(rows), scores(exchange, rows).numpy(), rtol=1.3e-6, atol=1e-5
    )
    with pytest.raises(InvalidMessage, match=r"VFL-4163.*2"):
        server.receive(Decline(2, 99, second[2].number + 1, "never asked"))


def with_held_out():
    """Return an exchange whose parties have the features and the table of the held-out rows, too."""
    made = run()
    plan, parties = make_plan(made.config, made.data), range(len(made.data.parties))
    made.runtime.server = make_server(plan, make_table(plan, ROWS + HELD_OUT))
    made.runtime.clients = [make_client(plan, index, with_held_out=True) for index in parties]
    return Exchange(made)


def scores(exchange, rows):
    """Return the sum of the scores that the clients' models have for these rows."""
    parties = zip(exchange.clients, exchange.run.data.parties, strict=True)
    return sum(embed(client.model, party.features, rows) for client, party in parties)


def test_only_held_out_rows_are_summed_on_request():
    exchange = Exchange(run())
    joined(exchange)
    with pytest.raises(InvalidMessage, match=r"VFL-4112.*20.*7"):
        exchange.clients[0].receive(Request(0, 7, np.array([3])))


def test_a_request_is_answered_once():
    exchange = with_held_out()
    joined(exchange)
    request = Evaluate(0, 7, np.array([ROWS]))
    assert exchange.clients[0].receive(request)
    with pytest.raises(InvalidMessage, match="VFL-4143"):
        exchange.clients[0].receive(request)


WORDS = np.zeros((4, 3), dtype=np.uint64)


def _upload(server, client=0, **changes):
    fields = {"client": client, "sequence": 50, "epoch": server.sums.key_epochs.number, "activation": 0}
    return MaskedUpload(**{**fields, "rows": _batch(), "words": WORDS, **changes})


def _batch():
    return batch_of(run(), 0)


REFUSALS = {
    "a later epoch": ({"epoch": 9}, "VFL-4131"),
    "another round": ({"activation": 4}, r"VFL-4177.*0.*4"),
    "another width": ({"words": WORDS[:, :1].copy()}, r"VFL-4222.*3.*1"),
    "held-out rows": ({"rows": np.array([0, 1, 2, 20])}, r"VFL-4082.*19.*0"),
    "an old sequence": ({"sequence": 0}, "VFL-4031"),
}


@pytest.mark.parametrize(("changes", "said"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_cannot_be_summed_is_refused_and_changes_nothing(changes, said):
    exchange = Exchange(run())
    server = joined(exchange)
    with pytest.raises(InvalidMessage, match=said):
        server.receive(_upload(server, **changes))
    assert (server.activations, server.sums.unsummed) == ([0, 0, 0], set())


def test_plain_uploads_are_refused_and_masked_ones_by_plain_servers():
    rows, matrix = np.arange(4), np.zeros((4, 3), np.float32)
    server = joined(Exchange(run()))
    for message in (Upload(0, 50, 0, rows, matrix), Refresh(0, 50, rows, matrix)):
        with pytest.raises(InvalidMessage, match="VFL-4161"):
            server.receive(message)
    plain = run(secure=False).runtime.server
    for message in (Offer(0, 50, 0, b"key"), _upload(server)):
        with pytest.raises(InvalidMessage, match="VFL-4173"):
            plain.receive(message)


def test_words_need_keys_and_a_client_has_one_key_an_epoch():
    server = run().runtime.server
    with pytest.raises(InvalidMessage, match="VFL-4132"):
        server.receive(_upload(server))
    server.receive(Offer(0, 1, 0, b"key"))
    with pytest.raises(InvalidMessage, match="VFL-4133"):
        server.receive(Offer(0, 2, 0, b"another"))


def test_what_was_said_in_an_older_epoch_is_passed_over():
    exchange = Exchange(run())
    server = joined(exchange)
    old = _upload(server)
    exchange.leave(1)
    assert server.receive(old) == []
    assert server.receive(Offer(0, 60, old.epoch, b"late")) == []
    assert server.activations == [0, 0, 0]


def test_keys_of_another_epoch_are_refused_by_the_client():
    exchange = Exchange(run())
    server = joined(exchange)
    with pytest.raises(InvalidMessage, match=rf"VFL-4111.*epoch {server.sums.key_epochs.number}\b.*epoch 9"):
        exchange.clients[0].receive(Keys(0, 9, (b"a", b"b", b"c")))


def test_a_client_behind_the_others_skips_to_their_round():
    """After a crash on both sides a client may be rounds behind. The server never sums different rounds."""
    exchange = Exchange(run())
    server = joined(exchange)
    server.activations = [5, 5, 3]
    for client, activation in zip(exchange.clients, server.activations, strict=True):
        client.activation = activation
    for index in (0, 1, 2):
        exchange.play(("wake", index))
    exchange.deliver()
    assert server.iteration == 0
    while server.iteration == 0:
        exchange.play(exchange.moves()[0])
    assert server.activations == [6, 6, 6]


def test_noise_and_masks_go_together():
    """Private clients are charged as without masks, and the masked scores include the noise."""
    made = run(
        privacy={
            "clip": 1.0,
            "noise": 0.5,
            "gradient_clip": 1.0,
            "gradient_noise": 1.0,
            "mu_max": "unlimited",
        }
    )
    made.train()
    assert made.runtime.server.iteration == 20
    assert all(ledger.spent.max() > 0 for ledger in made.ledgers)


def test_an_answer_lost_on_the_way_is_said_again():
    exchange = Exchange(run())
    joined(exchange)
    for index in range(3):
        exchange.play(("wake", index))
        while exchange.up[index]:
            exchange.play(("up", index))
    lost = exchange.down[1][-1]
    assert isinstance(lost, Gradient)
    exchange.leave(1)
    exchange.join(1)
    assert any(message is lost for message in exchange.down[1])
    exchange.deliver()
    assert exchange.clients[1].applied == 1
    assert not any(isinstance(message, Skipped) for queue in exchange.down for message in queue)
    assert exchange.server.receive(Join(0, 1, 1, 0))


def test_a_join_that_is_refused_ends_no_epoch():
    exchange = Exchange(run())
    joined(exchange)
    server = exchange.server
    epoch, before = server.sums.key_epochs.number, snapshot(server)
    with pytest.raises(InvalidMessage, match=r"VFL-4175.*0"):
        server.receive(Join(0, 5, 5))
    assert (server.sums.key_epochs.number, server.sums.key_epochs.missing) == (epoch, set())
    assert same(before, snapshot(server))
