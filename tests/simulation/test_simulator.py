import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.federation import SeenDelays, parameters, run_of, same, vertical_data
from vafl.errors import Stalled
from vafl.simulation.simulator import Link
from vafl.transport.codec import HEADER_BYTES, Codec
from vafl.transport.settings import ENCODINGS

DATA = vertical_data(rows=20, clients=2)
UPLOAD = HEADER_BYTES + 4 * 4 + 4 * 3 * 4  # 4 rows, 3 wide
GRADIENT = HEADER_BYTES + 4 * 3 * 4 + 2 * 8  # and 2 counters


def step_times(run, count, limit=10_000):
    """Return the virtual times of the first `count` steps."""
    times, simulator = [], run.runtime
    for _ in range(limit):
        before = simulator.updates
        simulator.advance()
        times += [simulator.now] * (simulator.updates - before)
        if len(times) >= count:
            return times
    raise AssertionError(f"only {len(times)} steps")


# --- time ---


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 1000)), max_size=10),
    st.floats(0, 3),
    st.floats(1, 1e4),
)
def test_messages_queue_for_the_bandwidth_then_take_the_latency(messages, latency, bandwidth):
    link, now, free = Link(latency, bandwidth), 0.0, 0.0
    for gap, size in messages:
        now += gap
        free = max(free, now) + size / bandwidth
        assert link.arrival(now, size) == pytest.approx(free + latency)


def test_a_link_without_limits_delivers_at_once():
    link = Link(0.0, 0.0)
    assert [link.arrival(3.0, 10**9), link.arrival(3.0, 1)] == [3.0, 3.0]


def test_the_times_of_a_run_worked_out_by_hand():
    """One client that sleeps 2 s; 112 bytes up, 104 down, at 100 bytes/s and 0.5 s latency."""
    run = run_of(
        vertical_data(rows=20, clients=1),
        delays={"kind": "fixed", "seconds": [2.0], "latency": 0.5, "bandwidth": 100.0},
    )
    first = 2 + 1.12 + 0.5
    answered = first + 1.04 + 0.5
    assert step_times(run, 2) == pytest.approx([first, answered + first])


def test_a_full_first_upload_keeps_the_batch_behind_it_waiting_for_the_line():
    """The refresh of 20 rows takes 48 + 80 + 240 bytes, 3.68 s. The 112 bytes of the batch follow it."""
    run = run_of(
        vertical_data(rows=20, clients=1),
        rule={"start": "upload"},
        delays={"kind": "fixed", "seconds": [2.0], "latency": 0.5, "bandwidth": 100.0},
    )
    assert step_times(run, 1) == pytest.approx([2 + 3.68 + 1.12 + 0.5])
    assert run.runtime.traffic[0].bytes_up == 368 + 112


def test_async_steps_whenever_anyone_is_ready_and_sync_when_the_slowest_is():
    fast_and_slow = {"kind": "fixed", "seconds": [1.0, 3.0]}
    assert step_times(run_of(DATA, delays=fast_and_slow), 7) == [1, 2, 3, 3, 4, 5, 6]
    assert step_times(run_of(DATA, rule={"name": "sync"}, delays=fast_and_slow), 3) == [3, 6, 9]


def test_a_slow_client_is_slow_to_answer_a_request_too():
    """D = 1: client 1's step at 1 s must wait for client 2, which has never uploaded, to wake at 5 s."""
    run = run_of(DATA, rule={"delay_bound": 1}, delays={"kind": "fixed", "seconds": [1.0, 4.0]})
    assert step_times(run, 1)[0] == 5.0


# --- bytes ---


def test_every_byte_is_counted():
    run = run_of(DATA, stop={"updates": 10}, delays={"kind": "fixed", "seconds": [1.0, 1.0]})
    points = run.train()
    traffic = run.runtime.traffic
    assert [t.messages_up for t in traffic] == [5, 5]
    assert [t.bytes_up for t in traffic] == [5 * UPLOAD] * 2
    assert [t.bytes_down for t in traffic] == [5 * GRADIENT] * 2
    assert (points[-1].bytes_up, points[-1].bytes_down) == (10 * UPLOAD, 10 * GRADIENT)


@given(
    st.sampled_from(["async", "t-sync", "sync"]),
    st.sampled_from(["upload-first", "query-first"]),
    st.sampled_from(["none", "random:3", "all", "lookahead"]),
    st.integers(0, 3),
)
def test_bytes_are_those_of_the_messages_that_were_sent(name, order, refresh, bound):
    run = run_of(
        DATA, rule={"name": name, "order": order, "delay_bound": bound}, schedule={"refresh": refresh}
    )
    sent, said = run.runtime.server.receive, []

    def listen(message):
        replies = sent(message)
        said.append((message, replies))
        return replies

    run.runtime.server.receive = listen
    run.train()
    events = run.runtime._events
    while events and events[0][0] == run.runtime.now:  # messages in transit have been counted already
        run.runtime.advance()
    size = Codec().size
    for client in (0, 1):
        up = sum(size(message) for message, _ in said if message.client == client)
        down = sum(size(reply) for _, replies in said for reply in replies if reply.client == client)
        assert (run.runtime.traffic[client].bytes_up, run.runtime.traffic[client].bytes_down) == (up, down)


# --- a seed fixes the whole history ---


@pytest.mark.parametrize("kind", ["poisson", "exponential", "poisson-process"])
@pytest.mark.parametrize(
    "rule",
    [
        {"name": "async", "order": "query-first"},
        {"name": "t-sync", "t": 2, "delay_bound": 3},
        {"name": "sync"},
        {"name": "async", "delay_bound": 2, "when_unanswered": "use", "local_steps": 2},
    ],
    ids=lambda rule: rule["name"],
)
def test_one_seed_gives_one_history_byte_for_byte(kind, rule):
    ends = []
    for seed in (3, 3, 4):
        run = run_of(
            vertical_data(clients=3),
            seed=seed,
            rule=rule,
            schedule={"refresh": "random:2"},
            delays={"kind": kind, "latency": 0.1, "dropouts": [{"client": 2, "start": 3.0, "end": 9.0}]},
            stop={"updates": 30},
        )
        history = run.train()
        assert run.runtime.now > 9, "somebody was away meanwhile"
        state = [p.numpy().tobytes() for p in parameters(run)]
        ends.append((history, state, run.delays(), [vars(t) for t in run.runtime.traffic]))
    assert ends[0] == ends[1]
    assert ends[0] != ends[2]


# --- drop-outs ---


def gone(client, start, end):
    return {
        "kind": "fixed",
        "seconds": [1.0, 1.0],
        "dropouts": [{"client": client, "start": start, "end": end}],
    }


def test_async_goes_on_without_a_client_and_with_it_when_it_is_back():
    run = run_of(DATA, delays=gone(2, 3.5, 8.5))
    active = {}
    while run.runtime.now < 14:
        run.runtime.advance()
        active[math.floor(run.runtime.now)] = list(run.runtime.server.activations)
    assert active[3] == [3, 3]
    assert active[8] == [8, 3]
    assert active[13] == [13, 3 + 5], "it sleeps first, then wakes at 9.5, 10.5, ..."


def test_sync_waits_for_a_client_and_resumes_with_it():
    run = run_of(DATA, rule={"name": "sync"}, delays=gone(2, 3.5, 8.5))
    times = step_times(run, 6)
    assert times == [1, 2, 3, 9.5, 10.5, 11.5]


def test_what_was_under_way_is_lost():
    """Client 2's upload of 1 s would arrive at 3 s, but its connection breaks at 2 s. It uploads again."""
    delays = {**gone(2, 2.0, 4.0), "seconds": [100.0, 1.0], "latency": 2.0}
    run = run_of(DATA, delays=delays)
    assert step_times(run, 1)[0] == 4 + 2 + 2 + 2, "back at 4, heard at 6, welcomed at 8, its upload at 10"
    assert run.runtime.traffic[1].messages_up == 3, "the upload, the join, the upload again"
    assert run.runtime.server.activations == [0, 1]


def test_a_new_connection_does_not_wait_for_the_lost_message_to_be_sent():
    delays = {**gone(2, 2.0, 4.0), "seconds": [1000.0, 1.0], "bandwidth": 1.0}
    run = run_of(DATA, delays=delays)
    join, welcome = HEADER_BYTES, HEADER_BYTES + 2 * 8
    assert step_times(run, 1)[0] == pytest.approx(4 + join + welcome + UPLOAD)


def test_an_answer_that_was_lost_is_sent_again():
    """Client 2's upload arrives at 3 s. Its answer would arrive at 5 s, but the link breaks at 4 s."""
    delays = {**gone(2, 4.0, 5.5), "seconds": [100.0, 1.0], "latency": 2.0}
    run = run_of(DATA, delays=delays)
    model = run.models[1]
    before = [p.detach().clone() for p in model.parameters()]
    while run.runtime.now < 9.0:
        run.runtime.advance()
    assert run.runtime.updates == 1
    assert same(before, [p.detach() for p in model.parameters()])
    while run.runtime.clients[1].applied == 0:
        run.runtime.advance()
    assert run.runtime.now == 5.5 + 2 + 2, "back at 5.5, heard at 7.5, answered at 9.5"
    assert not same(before, [p.detach() for p in model.parameters()])
    assert run.runtime.updates == 1, "it was stepped on once"
    join, welcome = HEADER_BYTES, HEADER_BYTES + 2 * 8
    traffic = run.runtime.traffic[1]
    assert (traffic.bytes_up, traffic.bytes_down) == (UPLOAD + join, GRADIENT + welcome + GRADIENT)


def test_an_answer_for_a_client_that_is_gone_is_kept_not_sent():
    """Client 2 uploads at 1 s and leaves. Client 1's upload at 3 s triggers the step for both."""
    delays = {**gone(2, 2.0, 4.0), "seconds": [3.0, 1.0]}
    run = run_of(DATA, rule={"name": "t-sync", "t": 2}, delays=delays)
    assert step_times(run, 1) == [3.0]
    assert [t.bytes_down for t in run.runtime.traffic] == [GRADIENT, 0]
    while run.runtime.now <= 4.0:
        run.runtime.advance()
    assert run.runtime.traffic[1].bytes_down == HEADER_BYTES + 2 * 8 + GRADIENT
    assert run.runtime.clients[1].applied == 1


def test_a_client_that_vanishes_again_before_it_was_welcomed_is_gone():
    windows = [{"client": 2, "start": 2.0, "end": 4.0}, {"client": 2, "start": 5.0, "end": 20.0}]
    delays = {"kind": "fixed", "seconds": [1.0, 100.0], "latency": 2.0, "dropouts": windows}
    run = run_of(DATA, delays=delays)
    while run.runtime.now < 18.0:
        run.runtime.advance()
    assert run.runtime.server.absent == {1}, "the join sent at 4 s was lost at 5 s"
    while run.runtime.now < 23.0:
        run.runtime.advance()
    assert run.runtime.server.absent == set()


@pytest.mark.parametrize("order", ["upload-first", "query-first"])
@pytest.mark.parametrize("name", ["async", "t-sync", "sync"])
def test_training_gets_over_many_drop_outs(name, order):
    starts = [(client, 0.8 * i + 0.3 * client) for i in range(6) for client in (1, 2, 3)]
    windows = [{"client": client, "start": start, "end": start + 0.5} for client, start in starts]
    run = run_of(
        vertical_data(clients=3),
        rule={"name": name, "t": 2, "order": order, "delay_bound": 3},
        delays={"kind": "exponential", "unit": 0.1, "latency": 0.01, "dropouts": windows},
        stop={"updates": 120},
    )
    assert run.train()[-1].updates >= 120
    assert run.runtime.now > 3, "most windows have passed"
    assert all(summary.max <= 3 for summary in run.delays())


def test_a_quorum_that_can_never_be_reached_is_stalled_with_the_reason():
    run = run_of(DATA, rule={"name": "t-sync", "t": 2}, delays=gone(2, 3.5, math.inf))
    with pytest.raises(Stalled, match=r"VFL-6821.*4\.00") as caught:
        run.train()
    assert "lower rule.t" in str(caught.value)
    assert run.runtime.updates == 3


def test_skipping_everything_for_ever_is_stalled_with_the_reason():
    run = run_of(DATA, rule={"delay_bound": 2, "when_unanswered": "skip"}, delays=gone(2, 3.5, math.inf))
    with pytest.raises(
        Stalled,
        match="VFL-7051",
    ):
        run.train()


@pytest.mark.parametrize(
    ("end", "stop"), [(math.inf, {"updates": 1000, "seconds": 500.0}), (400.0, {"updates": 20})]
)
def test_skipping_everything_is_no_stall_if_it_ends(end, stop):
    run = run_of(
        DATA, rule={"delay_bound": 2, "when_unanswered": "skip"}, delays=gone(2, 3.5, end), stop=stop
    )
    points = run.train()
    assert points[-1].seconds >= 400
    assert points[-1].updates >= stop["updates"] or end == math.inf


def test_a_bound_that_can_never_be_kept_is_stalled_with_the_reason():
    run = run_of(DATA, rule={"delay_bound": 2}, delays=gone(2, 3.5, math.inf))
    with pytest.raises(
        Stalled, match=r"VFL-6821.*fresh embeddings from clients \[1\] \(delay bound\); gone: \[1\]"
    ):
        run.train()


def test_the_same_drop_out_with_use_goes_on_and_reports():
    run = run_of(DATA, rule={"delay_bound": 2, "when_unanswered": "use"}, delays=gone(2, 3.5, math.inf))
    run.train()
    assert run.runtime.updates == 20
    assert run.delays()[1].over_bound > 0
    assert run.delays()[0].over_bound == 0


def test_skipped_uploads_make_no_steps_until_the_client_is_back():
    rule = {"delay_bound": 2, "when_unanswered": "skip"}
    run = run_of(DATA, rule=rule, schedule={"batch_size": 20}, delays=gone(2, 3.5, 8.5))
    times = step_times(run, 9)
    assert not [time for time in times if 6 < time < 8.5]
    run.train()
    assert all(summary.max <= 2 for summary in run.delays())
    assert run.runtime.updates == 20


def test_nothing_is_left_to_happen_when_nobody_is_there():
    run = run_of(
        vertical_data(clients=1),
        delays={"seconds": [1.0], "dropouts": [{"client": 1, "start": 0.5, "end": math.inf}]},
    )
    with pytest.raises(Stalled, match=r"VFL-6821.*1\.00"):
        run.train()
    assert same(run.runtime.server.activations, [0])


# --- more than one upload in flight ---


def test_a_window_fills_the_time_that_answers_take():
    """The client wakes after 1 s, and again 1 s later, while the round trip takes 2 + 2 s."""
    delays = {"kind": "fixed", "seconds": [1.0], "latency": 2.0}
    one, three = (
        run_of(vertical_data(clients=1), rule={"window": window}, delays=delays) for window in (1, 3)
    )
    assert step_times(one, 3) == [3, 8, 13]
    assert step_times(three, 7) == [3, 4, 5, 8, 9, 10, 13]


def test_what_a_model_misses_meanwhile_counts_as_delay():
    """Check the delays of uploads with a window of 3 and a round trip of 4 s.

    Uploads 1 and 2, sent at 2 s and 3 s, miss answers 0 and 1. Answers 0 to 2 arrive at 5, 6 and 7 s. Uploads
    3 to 5, sent at 6, 7 and 8 s, miss answer 2, answer 3, and answers 3 and 4. Upload 6, sent at 11 s, misses
    answer 5.
    """
    delays = {"kind": "fixed", "seconds": [1.0], "latency": 2.0}
    run = run_of(
        vertical_data(rows=4, clients=1), rule={"window": 3}, schedule={"batch_size": 4}, delays=delays
    )
    run.runtime.server.delays = seen = SeenDelays(1)
    step_times(run, 7)
    assert [int(delays.max()) for delays, _ in seen.used] == [0, 1, 2, 1, 1, 2, 1]


@pytest.mark.parametrize("rule", [{"name": "async"}, {"name": "t-sync", "t": 2}], ids=lambda r: r["name"])
@pytest.mark.parametrize("window", [2, 4])
def test_a_bound_holds_with_a_window_and_drop_outs(rule, window):
    starts = [(client, 3.0 * i + client) for i in range(4) for client in (1, 2)]
    windows = [{"client": client, "start": start, "end": start + 0.7} for client, start in starts]
    run = run_of(
        vertical_data(clients=3),
        rule={**rule, "window": window, "delay_bound": 4},
        delays={"kind": "exponential", "unit": 0.05, "latency": 0.2, "dropouts": windows},
        stop={"updates": 200},
    )
    run.runtime.server.delays = seen = SeenDelays(3, 4)
    assert run.train()[-1].updates == 200
    assert seen.largest() <= 4


# --- the end of a run ---


def test_answers_under_way_arrive_at_the_end_and_nothing_else_does():
    """Steps 3 and 4 are made at 5 s. Their answers would arrive at 6 s, but the clock has stopped."""
    delays = {"kind": "fixed", "seconds": [1.0, 1.0], "latency": 1.0}
    run = run_of(DATA, delays=delays, stop={"updates": 4})
    run.train()
    server, clients = run.runtime.server, run.runtime.clients
    assert run.runtime.now == 5.0
    assert server.activations == [2, 2]
    assert [client.applied for client in clients] == [2, 2]
    traffic = [vars(t).copy() for t in run.runtime.traffic]
    run.runtime.settle()
    assert [vars(t) for t in run.runtime.traffic] == traffic
    assert [client.activation for client in clients] == [2, 2]


def test_an_answer_lost_with_its_connection_does_not_arrive_at_the_end():
    delays = {**gone(2, 2.5, 9.0), "latency": 1.0, "seconds": [10.0, 1.0]}
    run = run_of(DATA, delays=delays, stop={"updates": 100, "seconds": 2.5})
    run.train()
    assert run.runtime.updates == 1
    assert run.runtime.clients[1].applied == 0


def test_the_server_stops_at_the_last_iteration():
    run = run_of(DATA, rule={"name": "async"}, stop={"updates": 5}, delays={"seconds": [1.0, 1.0]})
    run.train()
    assert run.runtime.updates == 5
    while run.runtime.now < 9:
        try:
            run.runtime.advance()
        except Stalled:
            break
    assert run.runtime.updates == 5


# --- encodings ---


@pytest.mark.parametrize("refresh", ["none", "all"])
def test_a_shorter_encoding_sends_fewer_bytes_and_still_trains(refresh):
    sizes, losses = {}, {}
    for encoding in ENCODINGS:
        run = run_of(
            DATA,
            network={"encoding": encoding},
            schedule={"refresh": refresh},
            delays={"kind": "fixed", "seconds": [1.0, 1.0]},
            stop={"updates": 60},
            evaluation={"every": 30},
        )
        points = run.train()
        sizes[encoding] = points[-1].bytes_up
        losses[encoding] = [point.train_loss for point in points[1:]]
        assert losses[encoding][-1] < losses[encoding][0]
        assert losses[encoding] == pytest.approx(losses["float32"], rel=0.02)
    assert sizes["float32"] > sizes["float16"] == sizes["bfloat16"] > 0
    assert sizes["float32"] > sizes["int8"]
    assert len({tuple(found) for found in losses.values()}) == len(ENCODINGS), "each rounds in its own way"


@pytest.mark.parametrize(("encoding", "matrix"), [("float16", 4 * 3 * 2), ("int8", 4 * (3 + 4))])
def test_encoded_bytes_are_counted_and_take_their_time_on_the_line(encoding, matrix):
    run = run_of(
        vertical_data(rows=20, clients=1),
        network={"encoding": encoding},
        delays={"kind": "fixed", "seconds": [2.0], "bandwidth": 100.0},
    )
    upload, answer = HEADER_BYTES + 4 * 4 + matrix, HEADER_BYTES + matrix + 8
    first = 2 + upload / 100
    assert step_times(run, 2) == pytest.approx([first, first + answer / 100 + first])
    traffic = run.runtime.traffic[0]
    assert (traffic.bytes_up, traffic.bytes_down) == (2 * upload, 2 * answer)


def test_what_arrives_has_lost_what_it_would_on_the_wire():
    run = run_of(vertical_data(rows=20, clients=1), network={"encoding": "bfloat16"})
    step_times(run, 1)
    cells = torch.from_numpy(run.runtime.server.table.cells)
    assert cells.abs().sum() > 0
    assert torch.equal(cells, cells.bfloat16().float())
    while run.runtime.clients[0].applied == 0:
        run.runtime.advance()
    assert run.runtime.clients[0].iteration == 0
