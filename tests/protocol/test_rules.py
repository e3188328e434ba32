import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.errors import ConfigError
from vafl.protocol.rules import Rule, Turn
from vafl.protocol.settings import RuleSettings


def turn(client, steps=True, activation=0):
    return Turn(client, activation, np.array([0]), steps, True)


turns = st.lists(st.builds(turn, st.integers(0, 3), st.booleans()), max_size=12)


@given(turns, st.integers(1, 4))
def test_a_step_takes_the_oldest_turns_of_different_clients_of_one_kind(waiting, quorum):
    group = Rule(quorum).ready(waiting)
    kinds = {steps: {t.client for t in waiting if t.steps is steps} for steps in (True, False)}
    assert bool(group) == any(len(clients) >= quorum for clients in kinds.values())
    if group:
        steps = group[0].steps
        assert len({t.client for t in group}) == len(group) == quorum
        assert all(t.steps is steps for t in group)
        assert steps or len(kinds[True]) < quorum, "a step goes before an answer alone"
        for t in group:
            assert t is next(w for w in waiting if w.client == t.client and w.steps is steps)


@given(turns)
def test_sync_steps_on_everybody_and_answers_queries_of_rounds_that_are_over(waiting):
    group = Rule(4, common_rows=True).ready(waiting)
    uploaded = {t.client for t in waiting if t.steps}
    if len(uploaded) == 4:
        assert {t.client for t in group if t.steps} == {0, 1, 2, 3}
    else:
        over = [t for t in waiting if not t.steps and t.client not in uploaded]
        assert group == over[:1]


def test_the_switch():
    assert Rule.of(RuleSettings("async"), 5) == Rule(1)
    assert Rule.of(RuleSettings("t-sync", t=3), 5) == Rule(3)
    assert Rule.of(RuleSettings("sync"), 5) == Rule(5, common_rows=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"t": 0}, r"VFL-4191.*0"),
        ({"delay_bound": -1}, r"VFL-4192.*\-1"),
        ({"window": -1}, r"VFL-4193.*64.*\-1"),
        ({"window": 65}, r"VFL-4193.*64.*65"),
        ({"window": 2, "order": "query-first"}, r"VFL-4194.*2"),
        ({"window": 3, "name": "sync"}, r"VFL-4194.*3"),
        ({"local_steps": 0}, r"VFL-4195.*0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        RuleSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({}, 2),
        ({"name": "t-sync"}, 2),
        ({"name": "sync"}, 1),
        ({"order": "query-first"}, 1),
        ({"window": 1}, 1),
        ({"window": 5}, 5),
    ],
    ids=str,
)
def test_two_uploads_fly_over_a_network_where_that_makes_sense_and_nothing_else_is_said(settings, window):
    assert RuleSettings(**settings).pipelined().window == window


def test_t_is_at_most_the_number_of_clients():
    with pytest.raises(ConfigError, match=r"VFL-4196.*3.*4"):
        Rule.of(RuleSettings("t-sync", t=4), 3)
    RuleSettings("async", t=4).check_clients(3)
    RuleSettings("t-sync", t=3).check_clients(3)
