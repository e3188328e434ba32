"""Load a page in Chromium and return the document after its scripts have run."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.waiting import LIMIT

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def rendered(url: str, profile: Path, *flags: str) -> str:
    """Return the document after a few seconds of virtual time. `flags` are passed to Chromium."""
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    asked = [str(CHROMIUM), *options, *flags, "--virtual-time-budget=3000", "--dump-dom", url]
    return subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT, check=True).stdout
