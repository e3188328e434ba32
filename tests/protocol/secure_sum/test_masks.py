"""Masks cancel in the sum of all clients, hide every other sum, and are used once."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.errors import InvalidMessage
from vafl.protocol.secure_sum.fixed_point import encode
from vafl.protocol.secure_sum.masks import KeyAgreement, NoKeySigner


def agreements(clients, run_id="run"):
    names = [f"client-{number}" for number in range(1, clients + 1)]
    return [KeyAgreement(run_id, names, index, NoKeySigner()) for index in range(clients)]


def masks(parties, epoch=0):
    offers = [party.offer(epoch) for party in parties]
    return [party.agree(epoch, offers) for party in parties]


def hidden(parties, scores, rows=None, number=0, purpose="batch"):
    rows = np.arange(len(scores[0])) if rows is None else rows
    return [own.hide(purpose, number, rows, part) for own, part in zip(parties, scores, strict=True)]


@given(st.integers(3, 6), st.integers(1, 5), st.integers(1, 4), st.data())
def test_the_sum_of_what_is_hidden_is_the_sum_of_the_scores(clients, lines, width, data):
    values = st.floats(-1e5, 1e5, width=32)
    flat = data.draw(st.lists(values, min_size=clients * lines * width, max_size=clients * lines * width))
    scores = np.array(flat, np.float32).reshape(clients, lines, width)
    total = np.add.reduce(hidden(masks(agreements(clients)), scores))
    assert np.array_equal(total, np.add.reduce([encode(part, clients) for part in scores]))


@pytest.mark.parametrize("clients", [3, 6])
def test_without_one_client_everything_looks_uniform(clients):
    """All byte values are equally frequent in the words of M - 1 clients, and in their sum."""
    scores = np.full((clients, 4000, 2), 3.25, np.float32)
    said = hidden(masks(agreements(clients)), scores)[1:]
    for words in (*said, np.add.reduce(said)):
        counts = np.bincount(words.view(np.uint8).ravel(), minlength=256)
        expected = words.nbytes / 256
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert chi_squared < 255 + 6 * np.sqrt(2 * 255), "6 standard deviations above its mean"
    for one, other in itertools.combinations(said, 2):
        agreeing = np.unpackbits((one ^ other).view(np.uint8)).mean()
        assert abs(agreeing - 0.5) < 6 * 0.5 / np.sqrt(64 * one.size), "and no two are alike"


def test_masks_differ_by_epoch_round_purpose_rows_and_width():
    parties = agreements(3)
    zeros = np.zeros((3, 4, 2), np.float32)
    agreed = masks(parties, epoch=1)
    first = hidden(agreed, zeros)[0]
    others = [
        hidden(agreed, zeros, number=1)[0],
        hidden(agreed, zeros, purpose="evaluation")[0],
        hidden(agreed, zeros, number=2, rows=np.array([0, 1, 2, 4]))[0],
        hidden(masks(parties, epoch=2), zeros)[0],
        hidden(masks(agreements(3, "another run")), zeros)[0],
    ]
    narrow = hidden(agreed, np.zeros((3, 8, 1), np.float32), number=3)[0]
    for words in (*others, narrow.reshape(4, 2)):
        assert not (words == first).any()


def test_clients_that_mean_different_rows_have_no_sum():
    agreed = masks(agreements(3))
    rows = [np.array([1, 2]), np.array([1, 2]), np.array([1, 3])]
    ones = np.ones((2, 1), np.float32)
    total = np.add.reduce([own.hide("batch", 0, mine, ones) for own, mine in zip(agreed, rows, strict=True)])
    assert not (total == 3 * encode(ones, 3)).any()


@pytest.mark.parametrize("number", [5, 4, 0])
def test_masks_of_a_round_serve_once(number):
    own = masks(agreements(3))[0]
    rows, ones = np.arange(2), np.ones((2, 1), np.float32)
    own.hide("batch", 5, rows, ones)
    with pytest.raises(InvalidMessage, match=f"VFL-4143.*batch round {number}"):
        own.hide("batch", number, rows, ones)
    assert own.hide("evaluation", number, rows, ones).shape == (2, 1)


def test_an_offer_is_new_each_time_and_serves_one_agreement():
    own, *others = agreements(3)
    offers = [own.offer(0), *(other.offer(0) for other in others)]
    assert own.offer(0) != offers[0]
    with pytest.raises(InvalidMessage, match="VFL-4141"):
        own.agree(0, offers)
    offers[0] = own.offer(0)
    own.agree(0, offers)
    with pytest.raises(InvalidMessage, match="VFL-4141"):
        own.agree(0, offers)


def test_all_clients_must_have_offered():
    own, *others = agreements(3)
    offers = [own.offer(0), *(other.offer(0) for other in others)]
    with pytest.raises(InvalidMessage, match=r"VFL-4141.*3"):
        own.agree(0, offers[:2])


@pytest.mark.parametrize("key", [b"", b"short", bytes(32)], ids=["none", "short", "of low order"])
def test_a_key_that_is_none_is_refused(key):
    own, *others = agreements(3)
    offers = [own.offer(0), others[0].offer(0), key]
    with pytest.raises(InvalidMessage, match=r"VFL-4142.*client\-3"):
        own.agree(0, offers)


def test_whoever_was_told_other_keys_masks_differently():
    """A server that shows different keys to different clients gets no sum."""
    parties = agreements(3)
    offers = [party.offer(0) for party in parties]
    forged = agreements(3)[2].offer(0)
    agreed = [
        parties[0].agree(0, offers),
        parties[1].agree(0, [*offers[:2], forged]),
        parties[2].agree(0, offers),
    ]
    said = hidden(agreed, np.ones((3, 2, 1), np.float32))
    for some in ((0, 1), (0, 2), (0, 1, 2)):
        total = np.add.reduce([said[client] for client in some])
        assert not (total == len(some) * encode(np.ones((2, 1), np.float32), 3)).any()
