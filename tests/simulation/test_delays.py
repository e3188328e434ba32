import math
from itertools import pairwise

import numpy as np
import pytest

from vafl.errors import ConfigError, DataError
from vafl.simulation.delays import DelaySettings, DropOut

CLIENTS = 4


def sleeps(settings, count, seed=0, clients=CLIENTS):
    """Return `count` sleeping times of every client, each from the end of the last one."""
    found = []
    for sleeper in settings.clock(clients, seed):
        now, times = 0.0, [0.0]
        for _ in range(count):
            now = sleeper.wakes_at(now)
            times.append(now)
        found.append([after - before for before, after in pairwise(times)])
    return found


@pytest.mark.parametrize("unit", [1.0, 0.5])
def test_poisson_sleeps_are_multiples_with_a_mean_of_m_over_clients_units(unit):
    for m, own in enumerate(sleeps(DelaySettings("poisson", unit=unit), 4000), 1):
        steps = np.array(own) * 2 * CLIENTS / unit
        assert np.allclose(steps, steps.round(), atol=1e-6)
        assert steps.mean() == pytest.approx(2 * m, abs=5 * math.sqrt(2 * m / 4000))
        assert steps.var() == pytest.approx(2 * m, rel=0.15)


@pytest.mark.parametrize("kind", ["exponential", "poisson-process"])
def test_exponential_sleeps_have_a_mean_of_m_units(kind):
    for m, own in enumerate(sleeps(DelaySettings(kind, unit=2.0), 4000), 1):
        assert np.mean(own) == pytest.approx(2 * m, rel=5 / math.sqrt(4000))
        assert np.std(own) == pytest.approx(2 * m, rel=0.1)


def test_a_poisson_process_runs_on_while_a_client_is_busy():
    """Events that pass while the client is busy are lost. Later events do not depend on the waiting time."""
    often, seldom = (DelaySettings("poisson-process").clock(1, seed=3)[0] for _ in range(2))
    points, now = [], 0.0
    while now < 50:
        now = often.wakes_at(now)
        points.append(now)
    for time in (0.0, 7.5, 7.5, 20.0, 49.0):
        found = seldom.wakes_at(time)
        assert found == next(point for point in points if point > time)


def test_fixed_sleeps():
    assert sleeps(DelaySettings("fixed", unit=0.5), 2) == [[0.5, 0.5], [1, 1], [1.5, 1.5], [2, 2]]
    assert sleeps(DelaySettings("fixed", seconds=(3.0, 0.25)), 2, clients=2) == [[3, 3], [0.25, 0.25]]
    assert sleeps(DelaySettings("none"), 2, clients=2) == [[0, 0], [0, 0]]


@pytest.mark.parametrize("kind", ["poisson", "exponential", "poisson-process"])
def test_the_seed_decides_and_every_client_has_its_own_stream(kind):
    settings = DelaySettings(kind)
    assert sleeps(settings, 20, seed=4) == sleeps(settings, 20, seed=4)
    assert sleeps(settings, 20, seed=4) != sleeps(settings, 20, seed=5)
    two, four = sleeps(DelaySettings("exponential"), 5, clients=2), sleeps(DelaySettings("exponential"), 5)
    assert two == four[:2]


# --- traces ---


def trace(folder, text):
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return DelaySettings("trace", trace=str(path))


def test_a_trace_is_used_over_and_over(tmp_path):
    settings = trace(tmp_path, "client,seconds\n1,1\n2,5\n1,2.5\n3,9\n1,0\n")
    assert sleeps(settings, 5, clients=2) == [[1, 2.5, 0, 1, 2.5], [5] * 5]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("client,seconds\n1,1\n", r"VFL-6812.*2"),
        ("client,delay\n1,1\n", r"VFL-6811.*'seconds'"),
        ("client,seconds\n1,soon\n", "VFL-6811"),
        ("client,seconds\none,1\n", "VFL-6811"),
        ("client,seconds\n1\n", "VFL-6811"),
        ("client,seconds\n1,1\n2,-3\n", r"VFL-6813.*\-3\.0.*2"),
        ("client,seconds\n1,nan\n2,3\n", r"VFL-6813.*nan.*1"),
        ("client,seconds\n1,inf\n2,3\n", r"VFL-6813.*inf"),
    ],
)
def test_a_trace_that_cannot_be_used_says_why(tmp_path, text, said):
    with pytest.raises(DataError, match=said):
        trace(tmp_path, text).clock(2, 0)


def test_a_trace_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="VFL-6810"):
        DelaySettings("trace", trace=str(tmp_path / "none.csv")).clock(2, 0)


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"unit": -1.0}, r"VFL-6802.*unit.*\-1\.0"),
        ({"latency": math.inf}, r"VFL-6802.*latency.*inf"),
        ({"bandwidth": math.nan}, r"VFL-6802.*bandwidth.*nan"),
        ({"kind": "trace"}, r"VFL-6803.*trace"),
        ({"trace": "x.csv"}, r"VFL-6803.*poisson.*x\.csv"),
        ({"kind": "fixed", "seconds": (1.0, -1.0)}, r"VFL-6804.*\[1\.0, \-1\.0\]"),
        ({"seconds": (1.0,)}, r"VFL-6805.*poisson"),
        (
            {"kind": "poisson-process", "unit": 0.0},
            r"VFL-6806.*0\.0",
        ),
        (
            {"dropouts": (DropOut(1, 0, 5), DropOut(2, 4, 6), DropOut(1, 5, 7))},
            r"VFL-6807.*1.*0.*5.*7",
        ),
        (
            {"dropouts": (DropOut(1, 3, 4), DropOut(1, 1, 9))},
            r"VFL-6807.*1.*9.*3.*4",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        DelaySettings(**settings)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 3), (4, 3), (math.nan, 3), (1, math.nan)])
def test_a_drop_out_ends_after_it_starts(start, end):
    with pytest.raises(ConfigError, match=rf"VFL-6801.*{start}.*{end}"):
        DropOut(1, start, end)


def test_settings_fit_the_number_of_clients():
    with pytest.raises(ConfigError, match=r"VFL-6808.*3.*2"):
        DelaySettings("fixed", seconds=(1.0, 2.0)).check_clients(3)
    for client in (0, 3):
        with pytest.raises(ConfigError, match=rf"VFL-6809.*2.*{client}"):
            DelaySettings(dropouts=(DropOut(client, 0, 1),)).clock(2, 0)
    DelaySettings(dropouts=(DropOut(2, 0, 1), DropOut(1, 0, 1), DropOut(2, 3, 4))).check_clients(2)


@pytest.mark.parametrize("kind", ["poisson", "exponential", "poisson-process", "fixed", "none"])
def test_mean_gaps_are_what_sleepers_sleep(kind):
    settings = DelaySettings(kind=kind, unit=2.0, latency=0.5)
    for gap, sleeper in zip(settings.mean_gaps(3), settings.clock(3, seed=1), strict=True):
        now = 0.0
        for _ in range(4000):
            now = sleeper.wakes_at(now)
        assert now / 4000 == pytest.approx(gap - 1.0, rel=0.06)


def test_mean_gaps_of_a_trace_and_of_given_seconds(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("client,seconds\n1,1.0\n1,3.0\n2,5.0\n")
    assert DelaySettings(kind="trace", trace=str(path)).mean_gaps(2) == [2.0, 5.0]
    assert DelaySettings(kind="fixed", seconds=(1.0, 7.0)).mean_gaps(2) == [1.0, 7.0]
