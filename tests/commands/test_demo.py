"""The demo shows what the README promises, and its federations are ordinary runs."""

import json

import pytest
from rich.console import Console

from vafl.commands import demo as demonstration


def shown(folder):
    with (folder / "log").open("w") as log:
        demonstration.demo(folder / "demo", Console(file=log))
    return folder / "demo"


def check(folder, clients):
    """Check every run with this many clients per rule, and the page."""
    names = [f"client-{number}" for number in range(1, clients + 1)]
    for rule in ("async", "t-sync", "sync", "centralised"):
        summary = json.loads((folder / rule / "summary.json").read_text())
        assert summary["rule"] == rule
        assert summary["metric"]["value"] > (0.92 if rule == "centralised" else 0.75)  # wall-clock seconds
    for rule in ("async", "t-sync", "sync"):
        assert {path.name for path in (folder / rule / "logs").iterdir()} == {f"{name}.log" for name in names}
        assert {path.name for path in (folder / rule / "models").iterdir()} == {"server", *names}
        assert json.loads((folder / rule / "summary.json").read_text())["violations"] == {}
    page = (folder / "index.html").read_text()
    assert "<svg" in page
    assert page.count("<tr>") == 5
    assert "times as long" in page
    assert "http-equiv" not in page.split("<svg")[0]


def test_in_small_it_writes_every_run_and_the_page(tmp_path, monkeypatch):
    """Two clients instead of four, and three seconds per rule instead of six."""
    monkeypatch.setitem(demonstration._BASE, "partition", {"clients": 2})
    monkeypatch.setattr(demonstration, "_SECONDS", 3.0)
    check(shown(tmp_path), clients=2)


@pytest.mark.slow
def test_in_full_it_writes_every_run_and_the_page(tmp_path):
    check(shown(tmp_path), clients=4)
