"""`vafl watch` as a process, in a browser."""

import re
import signal
import subprocess
import sys

from tests.browser.chromium import needs_browser, rendered
from tests.observe.dashboard.folders import written
from tests.waiting import LIMIT
from vafl.observe.status import ClientStatus


def page_of(runs, profile):
    """Return the page of `vafl watch` for a folder, as the browser renders it."""
    command = [sys.executable, "-m", "vafl.cli", "watch", str(runs), "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        found = re.search(r"2 runs: (\S+);", process.stdout.readline())
        page = rendered(found[1], profile)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 0
    return page


@needs_browser
def test_a_run_is_drawn_and_what_it_says_is_text(tmp_path):
    runs = tmp_path / "runs"
    client = ClientStatus("<img src=x onerror=alert(1)>", 7, 2_000_000, 500_000, gone=True)
    written(runs / "live", share=0.4, at=2**33, waiting="<b>bank</b>", clients=(client,))
    done = {
        "ended": "80 updates were made",
        "metric": {"name": "log_loss"},  # another headline
        "watched": "validation",
        "kept": {"validation": {"accuracy": 0.9}, "test": {"accuracy": 0.875, "log_loss": 0.3}},
        "baselines": {"trivial": {"test": {"accuracy": 0.125, "log_loss": 2.25}}},
    }
    written(runs / "done", summary=done, share=1.0)
    page = page_of(runs, tmp_path / "profile")
    assert page.count('class="run"') == 2  # a line in the chart for each run
    assert re.search(r'id="reading">validation (accuracy|log_loss)<', page)  # one metric for both runs
    for words in ("1 going on, 1 over", "80 updates were made", "0.8750", "trivial baseline, test", "0.1250"):
        assert words in page
    assert "trivial baseline, validation" in page  # of the active run
    assert "waiting for &lt;b&gt;bank&lt;/b&gt;" in page
    assert "&lt;img src=x onerror=alert(1)&gt; (not here)" in page
    assert "<img" not in page


@needs_browser
def test_a_loss_is_drawn_to_its_lowest_and_a_run_that_has_just_begun_is_no_level(tmp_path):
    for name, points in (("long", 36), ("young", 1)):
        written(tmp_path / "runs" / name, points, metric="log_loss", at=2**33)
    page = page_of(tmp_path / "runs", tmp_path / "profile")
    assert "stroke-dasharray" not in page
    top, height = map(float, re.search(r'<rect [^>]*y="([\d.]+)" [^>]*height="([\d.]+)"', page).groups())
    path = max(re.findall(r' d="M([^"]*)"', page), key=len)
    lowest_loss = max(float(point.split(",")[1]) for point in path.split("L"))
    assert lowest_loss < top + height
