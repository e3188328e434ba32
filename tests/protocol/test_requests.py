import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.errors import InvalidMessage
from vafl.protocol.messages import Decline, Evaluate, Refresh, Request
from vafl.protocol.requests import Part, Requests

ROWS = np.array([2, 3])


def answer(client=1, number=0, rows=ROWS):
    return Refresh(client, 0, rows, np.zeros((len(rows), 1), np.float32), number)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_it_knows_what_was_asked_and_not_answered(history):
    requests, expected = Requests(), {}
    for asks, which in history:
        if asks:
            made = requests.make(which, ROWS)
            assert made.number not in expected, "a number is used once"
            expected[made.number] = made
        elif which in expected:
            assert requests.answered(expected.pop(which)) == []
        for client in range(6):
            mine = [expected[number] for number in sorted(expected) if expected[number].client == client]
            assert requests.of(client) == mine
        assert requests.open.keys() == expected.keys()


def test_numbers_are_never_used_again():
    requests = Requests()
    first = requests.make(0, ROWS)
    requests.answered(first)
    assert requests.make(0, ROWS).number != first.number


FAULTS = {
    "another number": (answer(number=9), r"VFL-4071.*1.*9"),
    "another client": (answer(client=2), r"VFL-4071.*2.*0"),
    "no number": (answer(number=None), r"VFL-4071.*1.*None"),
    "declined, another number": (Decline(1, 0, 9, ""), r"VFL-4071.*1.*9"),
    "declined, a negative number": (Decline(1, 0, -1, ""), r"VFL-4071.*1.*\-1"),
    "declined by another client": (Decline(0, 0, 0, ""), r"VFL-4071.*0"),
    "another order": (answer(rows=ROWS[::-1]), r"VFL-4072.*0"),
    "too few rows": (answer(rows=ROWS[:1]), "VFL-4072"),
    "too many rows": (answer(rows=np.array([2, 3, 4])), "VFL-4072"),
}


@pytest.mark.parametrize(("message", "said"), FAULTS.values(), ids=FAULTS.keys())
def test_an_answer_must_fit_the_question(message, said):
    requests = Requests()
    made = requests.make(1, ROWS)
    with pytest.raises(InvalidMessage, match=said):
        requests.check(message)
    assert requests.of(1) == [made]


def test_an_answer_that_fits_is_taken_once():
    requests = Requests()
    made = requests.make(1, ROWS)
    for message in (answer(), Decline(1, 0, 0, "out of budget")):
        assert requests.check(message) is made
    requests.answered(made)
    with pytest.raises(InvalidMessage, match="VFL-4071"):
        requests.check(answer())


def test_parts_are_asked_for_in_turn_until_the_client_is_gone():
    requests = Requests()
    assert requests.make_in_turn(1, ()) == []
    parts = [
        Part(np.array([0, 1])),
        Part(np.array([8, 9]), held_out=True),
        Part(np.array([10]), held_out=True),
    ]
    (first,) = requests.make_in_turn(1, parts)
    (second,) = requests.answered(first)
    assert [(type(one), one.rows.tolist()) for one in (first, second)] == [
        (Request, [0, 1]),
        (Evaluate, [8, 9]),
    ]
    requests.forget(1)
    assert requests.of(1) == []
    with pytest.raises(InvalidMessage, match="VFL-4071"):
        requests.check(answer(number=second.number, rows=second.rows))


def test_a_late_answer_is_taken_once_though_nobody_waits_for_it():
    requests = Requests()
    made = requests.make(1, ROWS)
    requests.expire(made)
    assert requests.open == {}
    assert requests.of(1) == []
    assert requests.check(answer()) is made
    requests.answered(made)
    with pytest.raises(InvalidMessage, match="VFL-4071"):
        requests.check(answer())


def test_a_client_that_leaves_owes_no_late_answer():
    requests = Requests()
    requests.expire(requests.make(1, ROWS))
    requests.forget(1)
    with pytest.raises(InvalidMessage, match="VFL-4071"):
        requests.check(answer())


def test_a_poll_is_over_when_each_request_was_answered_declined_expired_or_forgotten():
    requests = Requests()
    poll = requests.poll(range(4), ROWS)
    first, second, third, fourth = poll.requests
    requests.answered(first)
    requests.answered(second, declined=True)
    requests.expire(third)
    assert poll.is_open
    requests.forget(fourth.client)
    assert not poll.is_open
    requests.answered(third)  # too late for the poll
    assert poll.answered == {first.client}
