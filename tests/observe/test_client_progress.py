"""A client's progress on its terminal and in its status file."""

import io
import json

from rich.console import Console

from tests.waiting import until
from vafl.observe.client_progress import ClientProgress, ClientView


def view(**others):
    facts = {
        "party": "bank",
        "connected": True,
        "uploads": 1234,
        "epochs": 2.5,
        "updates": 40,
        "most_updates": 100,
        "delay_mean": 1.25,
        "delay_max": 7,
        "bytes_up": 2_500_000,
        "bytes_down": 500_000,
    }
    return ClientView(**facts | others)


def test_a_line_says_what_a_client_may_know():
    line = view(seconds_left=61.0).line()
    for figure in (
        "1,234 uploads",
        "2.5 epochs",
        "40 of at most 100",
        "1.2",
        "max 7",
        "2.50 MB up",
        "61 s left",
    ):
        assert figure in line, line
    assert "not connected" in view(connected=False).line()
    assert "budget is spent" in view(finished="the budget is spent", seconds_left=9.0).line()
    assert "left" not in view(seconds_left=9.0, connected=False).line(over=True)
    assert "not connected" not in view(connected=False).line(over=True)
    assert [view(seconds_left=s).line().split("at most ")[-1][:-5] for s in (300, 10_800)] == [
        "5 min",
        "3.0 h",
    ]


def test_the_status_file_follows_and_a_log_gets_few_lines(tmp_path):
    seen, output = [0], io.StringIO()

    def look():
        seen[0] += 10
        return view(updates=seen[0], most_updates=10_000)

    def status():
        path = tmp_path / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    with ClientProgress(Console(file=output, width=300), tmp_path, look):
        until(lambda: status().get("seconds_left"), "an estimate")
    final = status()
    assert final["updates"] == seen[0]
    assert final["seconds"] > 0
    assert len(output.getvalue().splitlines()) == 1, "one line at the end, none every half second"


def test_a_terminal_shows_one_line_that_changes(tmp_path):
    output = io.StringIO()
    with ClientProgress(Console(file=output, force_terminal=True, width=300), tmp_path, view):
        pass
    assert "bank: 1,234 uploads" in output.getvalue()
