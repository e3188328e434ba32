"""The server compares what a client sends with what is normal for the run, and reports what is not normal."""

import numpy as np
import pytest

from vafl.errors import InvalidMessage
from vafl.transport.vitals import Vitals


class Observed:
    """Vitals of three clients, and every alarm that they reported."""

    def __init__(self, parties=("a", "b", "c")):
        self.now, self.reported = 0.0, []
        self.vitals = Vitals(
            parties, lambda party, alarm: self.reported.append((party, alarm.kind)), self._clock
        )

    def _clock(self):
        return self.now

    def upload(self, client, size, times=1):
        for _ in range(times):
            self.vitals.check(client, np.full((8, 4), size, np.float32))


def test_honest_growth_raises_no_alarm():
    seen, chance = Observed(), np.random.default_rng(0)
    for step in range(300):
        for client in range(3):
            seen.upload(client, float(1.01**step * chance.lognormal(0, 0.5)))
    assert seen.reported == []


def test_embeddings_that_jump_are_reported_and_taken():
    seen = Observed()
    seen.upload(0, 1.0, times=5)
    seen.upload(0, 30.0)
    assert seen.reported == [("a", "jump")]


@pytest.mark.parametrize("size", [2e4, 1e6, 1e30, 3e38])
def test_embeddings_that_would_destroy_the_head_are_refused(size):
    seen = Observed()
    seen.upload(0, 2.0, times=5)
    with pytest.raises(InvalidMessage, match="VFL-6261"):
        seen.upload(0, size)
    seen.upload(0, 2.0)


def test_a_first_message_is_taken_up_to_a_size_that_no_features_reach():
    seen = Observed()
    seen.upload(0, 1e7)
    with pytest.raises(InvalidMessage, match=r"VFL-6261.*1e\+08"):
        seen.upload(1, 1e9)


def test_poison_from_the_first_message_on_is_reported_once_others_have_spoken():
    """The client has sent embeddings of 1e6 from the beginning, so its own history shows no jump."""
    seen = Observed()
    seen.upload(0, 1e6, times=3)
    assert seen.reported == []
    for client in (1, 2):
        seen.upload(client, 1.5)
    seen.upload(0, 1e6)
    assert seen.reported == [("a", "size")]
    assert [alarm.kind for alarm in seen.vitals.alarms(0)] == ["size"]
    assert "size 1e+06, where the other clients' are 1.5" in seen.vitals.alarms(0)[0].text


def test_zeros_are_no_history():
    seen = Observed()
    seen.upload(0, 0.0)
    seen.upload(0, 5.0)
    assert seen.reported == []


def test_an_alarm_goes_off_after_a_while_and_is_reported_when_it_goes_on_again():
    seen = Observed()
    for _ in range(2):
        seen.upload(0, 1.0, times=2000)
        seen.upload(0, 30.0)
        assert len(seen.vitals.alarms(0)) == 1
        seen.now += 61.0
        assert seen.vitals.alarms(0) == []
    assert seen.reported == [("a", "jump")] * 2
    assert seen.vitals.report()["a"]["alarms"]["jump"]["count"] == 2


def test_a_client_that_makes_evaluations_worse_is_reported_after_three_in_a_row():
    seen, without = Observed(), {0: 0.8, 1: 0.6, 2: 1.2}
    for loss in (0.9, 0.9, 0.5, 0.9, 0.9):
        seen.vitals.evaluated(loss, without)
    assert seen.reported == []
    seen.vitals.evaluated(0.9, without)
    assert seen.reported == [("a", "loss"), ("b", "loss")]
    assert seen.vitals.report()["b"]["loss_without"] == 0.6


def test_a_model_that_overfits_is_reported_and_no_client_is_blamed():
    seen = Observed()
    for _ in range(3):
        assert seen.reported == []
        seen.vitals.evaluated(0.9, {0: 0.8, 1: 0.6, 2: 0.7})
    assert seen.reported == [("the model", "overfit")]
    assert seen.vitals.alarms(0) == seen.vitals.alarms(1) == []
    (alarm,) = seen.vitals.model_alarms()
    assert "0.6 to 0.8" in alarm.text
    assert seen.vitals.model_report()["overfit"]["count"] == 1
    seen.now += 61.0
    assert seen.vitals.model_alarms() == []


def test_clients_that_make_no_difference_do_not_hide_that_a_model_overfits():
    """A client that never joined makes no difference, for example."""
    seen = Observed()
    for _ in range(3):
        seen.vitals.evaluated(0.9, {0: 0.8, 1: 0.6, 2: 0.9})
    assert seen.reported == [("the model", "overfit")]


def test_one_client_that_does_harm_among_others_that_do_nothing_is_blamed():
    seen = Observed()
    for _ in range(3):
        seen.vitals.evaluated(5.0, {0: 0.6, 1: 5.0, 2: 4.999})
    assert seen.reported == [("a", "loss")]


def test_looks_at_an_overfitting_model_do_not_count_against_a_client():
    seen = Observed()
    for _ in range(2):
        seen.vitals.evaluated(0.9, {0: 0.8, 1: 0.6, 2: 0.7})
    for _ in range(2):
        seen.vitals.evaluated(0.9, {0: 0.8, 1: 0.95, 2: 0.95})
    assert seen.reported == []
    seen.vitals.evaluated(0.9, {0: 0.8, 1: 0.95, 2: 0.95})
    assert seen.reported == [("a", "loss")]


def test_clients_that_are_judged_in_turns_are_compared_with_all_others():
    seen = Observed()
    for _ in range(3):
        seen.vitals.evaluated(0.9, {2: 1.2})
        seen.vitals.evaluated(0.9, {0: 0.8, 1: 0.6})
    assert seen.reported == [("a", "loss"), ("b", "loss")]


def flood(seen, client, rate, seconds=60):
    """Send this many messages a second; return the longest pause that the client gets."""
    longest = 0.0
    for _ in range(rate * seconds):
        seen.now += 1 / rate
        longest = max(longest, seen.vitals.heard(client))
    return longest


def test_a_flood_is_reported_and_slowed_down():
    seen = Observed()
    assert flood(seen, 0, 100) == 0.0  # never too many
    assert seen.reported == []
    seen.vitals.heard(1)
    assert 0 < flood(seen, 0, 1000) <= 1 / 200
    assert seen.reported == [("a", "rate")]


def test_a_fast_client_among_fast_ones_is_not_slowed_down():
    seen = Observed(("a", "b"))
    for _ in range(10_000):
        seen.now += 1e-3
        assert seen.vitals.heard(0) == seen.vitals.heard(1) == 0.0


def test_a_client_alone_is_never_too_fast():
    seen = Observed(("a",))
    assert flood(seen, 0, 5000, seconds=20) == 0.0
