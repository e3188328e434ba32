"""Waiting for what another process does: until it is so, or a time-out that says what never came."""

import time

LIMIT = 300.0  # seconds before a wait counts as a hang, however busy the machine is


def until(condition, what, check=lambda: ""):
    """Returns the first true answer of `condition`; `check` may fail earlier, and says what to show then."""
    deadline = time.monotonic() + LIMIT
    while not (found := condition()):
        seen = check()
        assert time.monotonic() < deadline, f"never saw {what}: {seen}"
        time.sleep(0.02)
    return found
