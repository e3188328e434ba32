"""The live display, drawn on a made-up terminal."""

import io

from rich.console import Console

from vafl.observe.counting import CountProgress
from vafl.observe.progress import ClientStatus, Progress
from vafl.runtime.simulator import Traffic
from vafl.runtime.training import Point


class StandingStill:
    now = 12.5
    updates = 40
    traffic = ()


def shown(*, terminal: bool, points: int = 1) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100)
    clients = [ClientStatus("bank", 7, 3.5, 12, Traffic(2_000_000, 500_000, 7), gone=True)]
    progress = Progress(console, "async: a run", "accuracy", StandingStill(), lambda: 0.4, lambda: clients)
    with progress:
        for _ in range(points):
            progress.observe(Point(12.5, 40, 2_000_000, 500_000, 0.25, 0.875))
    return output.getvalue()


def test_a_terminal_shows_the_run_and_each_client():
    text = shown(terminal=True)
    for word in (
        "async: a run",
        "40 updates",
        "loss 0.2500",
        "accuracy 0.8750",
        "bank (gone)",
        "2.00",
        "0.50",
        "3.5",
    ):
        assert word in text


def test_a_log_file_gets_a_line_now_and_then():
    text = shown(terminal=False, points=50)
    assert text.count("40 updates") == 1
    assert "\x1b" not in text


def test_what_is_counted_gets_a_line_at_each_tenth():
    console = Console(file=(output := io.StringIO()), width=100)
    with CountProgress(console, "ids") as progress:
        for _ in range(2):  # an alignment that is interrupted begins anew
            progress.begin(1000)
            for _ in range(100):
                progress.advance(10)
    lines = output.getvalue().splitlines()
    assert len(lines) == 2 * 11
    assert lines[11] == "1,000 ids to go through"
    assert lines[12].startswith("   10%  100 ids, ")
