"""Every message that breaks a rule is refused and changes nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.federation import Exchange, run_of, same, snapshot, vertical_data
from vafl.errors import InvalidMessage
from vafl.protocol.messages import Decline, Gradient, Join, Leave, Query, Refresh, Skipped, Upload

DATA = vertical_data(rows=6, clients=3, shape=(2,))
WIDTH = 3


def upload(client=0, sequence=100, activation=1, rows=(0, 1), width=WIDTH, answer=True, in_flight=0):
    matrix = np.ones((len(rows), width), np.float32)
    return Upload(client, sequence, activation, np.array(rows), matrix, answer, in_flight)


def refresh(client=1, sequence=100, rows=(0, 1), width=WIDTH, request=None, in_flight=0):
    matrix = np.ones((len(rows), width), np.float32)
    return Refresh(client, sequence, np.array(rows), matrix, request, in_flight)


def waiting_for_client_2():
    """Return a server on which an upload of client 1 waits for fresh rows of client 2."""
    exchange = Exchange(run_of(DATA, rule={"delay_bound": 2}, schedule={"batch_size": 6}))
    for client in (2, 1, 0):
        exchange.turn(client)
    exchange.play(("wake", 1))
    exchange.play(("up", 1))
    (request,) = exchange.down[2]
    return exchange.server, request


def refuses(server, message, said):
    before = snapshot(server)
    with pytest.raises(InvalidMessage, match=said):
        server.receive(message)
    assert same(before, snapshot(server))


MESSAGES = {
    "client 3 of 3": (upload(client=3), r"VFL-4171.*2.*3"),
    "client -1": (Join(-1), r"VFL-4171.*\-1"),
    "client 9 leaves": (Leave(9), r"VFL-4171.*9"),
    "a repeated sequence": (upload(sequence=2), r"VFL-4031.*0.*2"),
    "a stale sequence": (refresh(sequence=0), r"VFL-4031.*3.*0"),
    "a repeated activation": (upload(activation=0), r"VFL-4177.*0.*1"),
    "an activation left out": (upload(activation=2), r"VFL-4177.*1.*2"),
    "rows beyond the table": (upload(rows=(0, 6)), r"VFL-4082.*5.*0.*6"),
    "a negative row": (upload(rows=(-1, 2)), r"VFL-4082.*\-1.*2"),
    "a row named twice": (upload(rows=(2, 4, 2)), "VFL-4081"),
    "another width": (upload(width=4), r"VFL-4222.*0.*3.*4"),
    "a refresh beyond the table": (refresh(rows=(7,)), r"VFL-4082.*7"),
    "a refresh that names a row twice": (refresh(rows=(1, 1)), "VFL-4081"),
    "a refresh of another width": (refresh(width=1), r"VFL-4222.*1.*3"),
    "a refresh nobody asked for": (refresh(request=0), r"VFL-4071.*1.*0"),
    "an answer to another request": (refresh(client=2, request=77), r"VFL-4071.*2.*77"),
    "an answer with too few rows": (refresh(client=2, rows=(0, 1), request=2), "VFL-4072"),
    "a decline nobody asked for": (Decline(0, 100, 0, "no"), r"VFL-4071.*0"),
    "a decline with a stale sequence": (Decline(2, 0, 2, "no"), "VFL-4031"),
    "a query for nothing": (Query(0, 100, 1), r"VFL-4174.*0.*1"),
    "a query with a stale sequence": (Query(1, 1, 0), "VFL-4031"),
    "a join from beyond all counting": (Join(0, 2**63 - 1, 2**63 - 1), r"VFL-4175.*0.*9223372036854775807"),
    "a join with too many in flight": (Join(0, 66, 1), r"VFL-4176.*64.*65"),
}


@pytest.mark.parametrize(("message", "said"), MESSAGES.values(), ids=MESSAGES.keys())
def test_a_refused_message_changes_nothing(message, said):
    server, request = waiting_for_client_2()
    assert request.number == 2
    refuses(server, message, said)


def test_after_all_that_the_step_goes_on():
    server, request = waiting_for_client_2()
    for message, said in MESSAGES.values():
        refuses(server, message, said)
    (reply,) = server.receive(refresh(client=2, rows=request.rows.tolist(), request=request.number))
    assert isinstance(reply, Gradient)
    refuses(server, refresh(client=2, sequence=101, request=request.number), "was not asked")


@pytest.mark.parametrize(
    "message", [refresh(request=0), Decline(1, 100, 0, "no")], ids=["refresh", "decline"]
)
def test_without_a_bound_nothing_was_ever_asked(message):
    refuses(run_of(DATA).runtime.server, message, "client 1 was not asked request 0")


def test_sync_refuses_other_rows_than_the_common_ones():
    server = run_of(DATA, rule={"name": "sync"}).runtime.server
    server.receive(upload(client=1, activation=0, rows=(2, 3)))
    refuses(
        server,
        upload(client=0, activation=0, rows=(3, 2)),
        r"VFL-4180.*Client 0 .*client 1",
    )
    server.receive(upload(client=0, activation=0, rows=(2, 3)))


def test_a_query_is_for_the_last_upload_and_answered_once():
    server = run_of(DATA, rule={"order": "query-first"}).runtime.server
    server.receive(upload(activation=0, answer=False))
    refuses(server, Query(0, 101, 1), r"VFL-4174.*activation 1")
    (answer,) = server.receive(Query(0, 101, 0))
    assert isinstance(answer, Gradient)
    (again,) = server.receive(Query(0, 102, 0))  # no fault: the query may cross an answer repeated at a join
    assert isinstance(again, Skipped)


def test_a_client_asks_one_thing_at_a_time():
    server = run_of(DATA, rule={"name": "t-sync", "t": 2, "order": "query-first"}).runtime.server
    server.receive(upload(activation=0, answer=False))
    assert server.receive(Query(0, 101, 0)) == []
    refuses(server, Query(0, 102, 0), r"VFL-4174.*activation 0")


def test_every_kind_of_message_counts_for_the_sequence():
    server, request = waiting_for_client_2()
    server.receive(refresh(client=0, sequence=100))
    refuses(server, refresh(client=0, sequence=100), r"VFL-4031.*100.*100")
    server.receive(Decline(2, 100, request.number, "no"))
    refuses(server, refresh(client=2, sequence=100), r"VFL-4031.*100.*100")
    server = run_of(DATA, rule={"order": "query-first"}).runtime.server
    server.receive(upload(activation=0, answer=False))
    refuses(server, Query(0, 100, 0), r"VFL-4031.*100.*100")
    server.receive(Query(0, 101, 0))
    refuses(server, refresh(client=0, sequence=101), r"VFL-4031.*101.*101")


def test_rows_that_are_held_out_are_refreshed_but_never_stepped_on():
    """The table has 6 rows; only the first 4 have labels at the server."""
    server = run_of(DATA).runtime.server
    server._training_rows = 4
    message = r"VFL-4179.*4"
    refuses(server, upload(activation=0, rows=(0, 4)), message)
    assert server.receive(refresh(client=0, rows=(4, 5))) == []
    (answer,) = server.receive(upload(activation=0, sequence=101, rows=(0, 3)))
    assert isinstance(answer, Gradient)


def test_a_client_that_left_must_join_first():
    server, request = waiting_for_client_2()
    server.receive(Leave(2))
    refuses(server, upload(client=2), r"VFL-4172.*2.*Upload")
    refuses(server, refresh(client=2, rows=request.rows.tolist(), request=request.number), "VFL-4172")
    server.receive(Leave(2))
    server.receive(Join(2, activation=1, applied=1))
    server.receive(upload(client=2, sequence=0))


def restored(forgettable=1000, activations=(0, 0, 0)):
    """A server that was restored from a checkpoint and may have lost some uploads of each client."""
    server = run_of(DATA).runtime.server
    server.restore(0, activations, server.descent.state(), forgettable=forgettable)
    return server


def test_a_client_may_be_ahead_of_a_restored_server_once_and_not_again():
    """A client may be ahead by what the server lost. A larger count makes the other clients refresh."""
    server = restored()
    server.receive(Join(0, 1002, 1000))
    assert server.activations == [1000, 0, 0]
    refuses(server, Join(0, 1001, 1001), r"VFL-4175.*1000.*0.*1001")
    server.receive(Leave(0))
    refuses(server, Join(0, 1001, 1001), r"VFL-4175.*1000")
    server.receive(Join(0, 1001, 1000))
    server.receive(upload(activation=1000))
    server.receive(Join(0, 1001, 1001))
    assert server.activations == [1001, 0, 0]


@pytest.mark.parametrize("claim", [1001, 2**40, 2**62])
def test_a_first_join_claims_no_more_than_the_run_can_have_reached(claim):
    refuses(restored(), Join(0, claim, claim), rf"VFL-4175.*1000.*0.*{claim}")
    refuses(run_of(DATA).runtime.server, Join(0, claim, claim), rf"VFL-4175.*at most 0 .*{claim}")


def test_a_checkpoint_with_a_count_beyond_reach_can_be_resumed():
    """Older versions wrote such counts to checkpoints. Clients refuse a server that sends one."""
    server = restored(activations=(2**62, 3, 0))
    assert server.activations == server.durable == [0, 3, 0]
    (welcome,) = server.receive(Join(0, 7, 7))
    assert welcome.activations == (7, 3, 0)


@pytest.mark.parametrize("rule", [{"name": "t-sync", "t": 2}, {"delay_bound": 1}], ids=str)
def test_a_client_cannot_pile_up_uploads_while_a_step_waits(rule):
    server = run_of(DATA, rule=rule).runtime.server
    for number in range(64):
        assert not any(isinstance(reply, Gradient) for reply in server.receive(upload(0, number, number)))
    refuses(server, upload(0, 64, 64), r"VFL-4178.*64.*client 0")
    server.receive(upload(1, 0, 0))
    if "t" in rule:
        server.receive(upload(0, 64, 64))


rows = st.lists(st.integers(-1, 6), min_size=1, max_size=4)
noise = st.one_of(
    st.builds(
        upload,
        st.integers(-1, 3),
        st.integers(0, 9),
        st.integers(0, 4),
        rows,
        st.sampled_from([2, 3]),
        st.booleans(),
    ),
    st.builds(
        lambda client, activation, behind: upload(client, 50, activation, in_flight=min(behind, activation)),
        st.integers(0, 2),
        st.integers(0, 4),
        st.integers(0, 4),
    ),
    st.builds(
        refresh,
        st.integers(-1, 3),
        st.integers(0, 9),
        rows,
        st.sampled_from([2, 3]),
        st.sampled_from([None, 0, 1, 2]),
        st.integers(0, 3),
    ),
    st.builds(Query, st.integers(-1, 3), st.integers(0, 9), st.integers(0, 4)),
    st.builds(Decline, st.integers(-1, 3), st.integers(-1, 9), st.integers(-1, 3), st.just("no")),
    st.builds(Leave, st.integers(-1, 3)),
    st.builds(
        lambda client, applied, behind, iteration: Join(client, applied + behind, applied, iteration),
        st.integers(-1, 3),
        st.integers(0, 3),
        st.integers(0, 2),
        st.integers(-1, 3),
    ),
)


@given(
    st.sampled_from(["async", "t-sync", "sync"]),
    st.sampled_from([0, 1]),
    st.sampled_from(["wait", "skip"]),
    st.lists(noise, max_size=30),
)
def test_whatever_is_said_a_message_is_taken_or_leaves_no_trace(name, bound, policy, said):
    rule = {"name": name, "delay_bound": bound, "when_unanswered": policy}
    server = run_of(DATA, rule=rule).runtime.server
    for message in said:
        before = snapshot(server)
        try:
            server.receive(message)
        except InvalidMessage:
            assert same(before, snapshot(server))
    if bound and server.delays.summaries():
        assert all(summary.max <= bound and summary.never == 0 for summary in server.delays.summaries())
