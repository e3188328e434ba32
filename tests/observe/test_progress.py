"""The live display, drawn on a fake terminal."""

import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from vafl.observe.counting import CountProgress
from vafl.observe.evaluation import Evaluation
from vafl.observe.progress import Progress, ShownFigures
from vafl.observe.status import ClientStatus, Status
from vafl.protocol.staleness import DelaySummary


class StandingStill:
    now = 12.5
    updates = 40
    traffic = ()


def made(folder, output=None, *, terminal: bool = False) -> Progress:
    return Progress(
        Console(file=output or io.StringIO(), force_terminal=terminal, width=100),
        folder,
        "async: a run",
        ShownFigures("accuracy", "validation"),
        StandingStill(),
        share_done=lambda: 0.4,
        clients=lambda: [ClientStatus("bank", 7, 2_000_000, 500_000, gone=True)],
        delays=lambda: [DelaySummary(80, 12, 3.5, 3, 11, 0, 0, 1)],
        waiting=lambda: "bank",
    )


def shown(folder, *, terminal: bool, points: int = 1) -> str:
    output = io.StringIO()
    with made(folder, output, terminal=terminal) as progress:
        for _ in range(points):
            progress.observe(Evaluation(12.5, 40, 2_000_000, 500_000, 0.25, 0.875))
    return output.getvalue()


def test_a_terminal_shows_the_run_and_each_client(tmp_path):
    text = shown(tmp_path, terminal=True)
    for word in (
        "async: a run",
        "40 updates",
        "loss 0.2500",
        "validation accuracy 0.8750",
        "waiting for bank",
        "bank (gone)",
        "2.00",
        "0.50",
        "3.5",
    ):
        assert word in text


def test_a_client_that_is_here_and_silent_is_shown_so(tmp_path):
    progress, output = made(tmp_path), io.StringIO()
    progress.clients = lambda: [ClientStatus("bank", 7, 0, 0, silent=12.3)]
    progress.console = Console(file=output, force_terminal=True, width=100)
    with progress:
        pass
    assert "bank (silent for 12 s)" in output.getvalue()
    status = Status.of(json.loads((tmp_path / "status.json").read_bytes()))
    assert status.clients[0].silent == 12.3


def test_a_log_file_gets_a_line_now_and_then(tmp_path):
    text = shown(tmp_path, terminal=False, points=50)
    assert text.count("40 updates") == 1
    assert "\x1b" not in text


def test_the_folder_tells_how_the_run_stood_last(tmp_path):
    shown(tmp_path, terminal=False)
    status = Status.of(json.loads((tmp_path / "status.json").read_bytes()))
    assert (status.updates, status.share, status.waiting) == (40, 0.4, "bank")
    assert status.clients == (ClientStatus("bank", 7, 2_000_000, 500_000, True, 3.5, 12),)
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


def test_the_display_s_thread_and_the_run_s_may_look_at_the_same_time(tmp_path):
    """An error in the run's thread, which reports an evaluation, would end the run."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with made(tmp_path) as progress, ThreadPoolExecutor(2) as threads:
            looks = [threads.submit(lambda: [progress._look() for _ in range(3000)]) for _ in range(2)]
            assert all(look.result() for look in looks)
    finally:
        sys.setswitchinterval(interval)


def test_what_is_counted_gets_a_line_at_each_tenth():
    console = Console(file=(output := io.StringIO()), width=100)
    with CountProgress(console, "ids") as progress:
        for _ in range(2):  # an interrupted alignment starts again
            progress.begin(1000)
            for _ in range(100):
                progress.advance(10)
    lines = output.getvalue().splitlines()
    assert len(lines) == 2 * 11
    assert lines[11] == "1,000 ids to process"
    assert lines[12].startswith("   10%  100 ids, ")
