"""The planned number of uploads of a record against what the simulator's server receives."""

import math

import numpy as np
import pytest

from tests.federation import run_of, vertical_data
from vafl.errors import ConfigError
from vafl.privacy.analysis.exposure import ExpectedUsage, Exposure, expose, worst
from vafl.protocol.messages import Refresh, Upload

ROWS, BATCH, CLIENTS = 200, 20, 3


def counted(refresh="none", kind="epochs", delays=None, rule=None, updates=150):
    """Return a run's uploads of every record, [client, kind, row]: batches, refreshes, requests."""
    run = run_of(
        vertical_data(ROWS, CLIENTS, (2,)),
        schedule={"batch_size": BATCH, "refresh": refresh, "kind": kind},
        delays=delays or {"kind": "poisson"},
        rule=rule or {},
        stop={"updates": updates},
        evaluation={"every": 10**6},
    )
    counts = np.zeros((CLIENTS, 3, ROWS), dtype=int)
    receive = run.runtime.server.receive

    def count(message):
        if isinstance(message, Upload | Refresh):
            kind = 0 if isinstance(message, Upload) else 1 if message.request is None else 2
            counts[message.client, kind, message.rows] += 1
        return receive(message)

    run.runtime.server.receive = count
    run.train()
    return run, counts


def planned(run, client, **terms):
    done = run.runtime.server.activations
    others = tuple(map(float, done[:client] + done[client + 1 :]))
    return expose(ExpectedUsage(ROWS, BATCH, activations=float(done[client]), others=others, **terms))


DELAYS = [
    {"kind": "poisson"},
    {"kind": "exponential"},
    {"kind": "none"},
    {"kind": "fixed", "seconds": [1.0, 1.0, 10.0]},
]


@pytest.mark.parametrize("delays", DELAYS)
def test_epochs_use_every_record_equally_often(delays):
    run, counts = counted(delays=delays)
    for client in range(CLIENTS):
        found = planned(run, client)
        assert found.uploads == found.batches == found.updates == counts[client].sum(axis=0).max()
        assert found.vectors == counts[client].sum()


def test_afresh_drawn_batches_use_some_record_much_more_often():
    run, counts = counted(kind="iid", updates=600)
    for client in range(CLIENTS):
        found, most = planned(run, client, kind="iid"), counts[client, 0].max()
        assert most <= found.batches <= 1.6 * most
    example = expose(ExpectedUsage(60_000, 600, activations=2000, kind="iid"))
    assert 41 <= example.batches <= 50  # privacy.md: about 41, against 20 in epochs
    assert expose(ExpectedUsage(60_000, 600, activations=2000)).batches == 20


@pytest.mark.parametrize("delays", DELAYS)
@pytest.mark.parametrize("kind", ["epochs", "iid"])
def test_look_ahead_uploads_each_row_about_once_per_use_and_once_per_own_activation(delays, kind):
    run, counts = counted("lookahead", kind, delays)
    for client in range(CLIENTS):
        found, refreshed = planned(run, client, kind=kind, refresh="lookahead"), counts[client, 1]
        assert refreshed.sum() <= found.vectors - run.runtime.server.activations[client] * BATCH
        assert refreshed.max() <= found.refreshes <= run.runtime.server.activations[client]
        assert found.refreshes <= max(2.6 * refreshed.max(), refreshed.max() + 12)


def test_look_ahead_to_a_silent_client_uploads_its_next_batch_at_every_activation():
    run, counts = counted("lookahead", delays={"kind": "fixed", "seconds": [1.0, 1.0, 1e6]})
    active = run.runtime.server.activations[0]
    assert counts[0, 1].max() >= active - 2
    assert planned(run, 0, refresh="lookahead").refreshes >= counts[0, 1].max()


def test_random_refresh():
    run, counts = counted("random:30", updates=600)
    for client in range(CLIENTS):
        found, most = planned(run, client, refresh="random", refresh_rows=30), counts[client, 1].max()
        assert most <= found.refreshes <= 1.8 * most


def test_refresh_of_everything():
    run, counts = counted("all")
    for client in range(CLIENTS):
        found = planned(run, client, refresh="all")
        assert 0 <= found.refreshes - counts[client, 1].max() <= 1  # the last answer may come too late


@pytest.mark.parametrize("bound", [1, 5, 30])
def test_an_honest_server_asks_for_a_cell_once_per_use_at_most(bound):
    run, counts = counted(rule={"delay_bound": bound})
    for client in range(CLIENTS):
        found = planned(run, client, delay_bound=True)
        assert counts[client, 2].max() <= found.requests
        assert counts[client].sum(axis=0).max() <= found.uploads
    assert counts[:, 2].max() > 0
    assert "mu_max" in found.notes[-1]


def test_a_first_upload_of_all_rows_and_local_steps_count():
    run, counts = counted(rule={"start": "upload", "local_steps": 3})
    found = planned(run, 0, full_start=True, local_steps=3)
    assert found.uploads == counts[0].sum(axis=0).max()
    assert found.updates == 3 * found.batches


def test_evaluations_use_held_out_records_only():
    found = expose(ExpectedUsage(ROWS, BATCH, activations=20, held_out=50, evaluations=7))
    assert (found.evaluations, found.uploads) == (7, 2)
    assert found.vectors == 20 * BATCH + 7 * 50
    assert expose(ExpectedUsage(ROWS, BATCH, activations=20, evaluations=7)).evaluations == 0


def test_the_worst_of_several_clients_is_the_worst_in_every_count():
    one, other = Exposure(1, 5, 0, 1, 3, 10, ("a",)), Exposure(2, 4, 0, 2, 3, 20, ("a", "b"))
    assert worst([one, other]) == Exposure(2, 5, 0, 2, 3, 20, ("a", "b"))


def test_a_course_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"VFL-5021.*10.*11"):
        ExpectedUsage(10, 11, activations=1)
    with pytest.raises(ConfigError, match="VFL-5022"):
        ExpectedUsage(10, 5, activations=math.nan)
