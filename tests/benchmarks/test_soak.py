"""The soak's verdicts on made-up samples, and a short real run."""

import json

import pytest
from benchmarks import soak
from benchmarks.soak import main, memory_verdict, time_verdict


def samples(size):
    return [(float(at), {"server": 1000, "client-1": round(size(at))}) for at in range(100)]


def test_memory_may_settle_but_not_grow():
    assert memory_verdict(samples(lambda at: 500 if at < 10 else 1000))["memory_flat"]
    seen = memory_verdict(samples(lambda at: 1000 + at))
    assert not seen["memory_flat"]
    assert round(seen["memory"]["client-1"]["bytes_per_second"], 6) == 1.0
    assert seen["memory"]["server"]["growth"] == 0.0


def test_a_process_that_is_gone_at_the_end_still_counts():
    gone = [(at, sizes if at < 95 else {"server": 1000}) for at, sizes in samples(lambda at: 1000)]
    assert memory_verdict(gone)["memory"].keys() == {"server", "client-1"}


def points(seconds):
    return [{"updates": 10 * n, "seconds": seconds(n)} for n in range(101)]


def test_time_may_vary_but_not_grow():
    assert time_verdict(points(lambda n: 1.0 * n))["time_flat"]
    seen = time_verdict(points(lambda n: n + n * n / 200))
    assert not seen["time_flat"]
    assert seen["slowing"] > 1.5


@pytest.mark.slow
def test_a_small_soak(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(soak, "EVERY_SECONDS", 0.05)
    main(["--updates", "300", "--out", str(tmp_path / "soak.json")])
    seen = json.loads((tmp_path / "soak.json").read_text())
    assert len(seen["seconds_per_1000"]) >= 5
    assert seen["memory"].keys() == {"server", *(f"client-{number}" for number in range(1, 5))}
    assert "300 updates in" in capsys.readouterr().out
