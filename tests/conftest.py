"""Settings of all tests: one thread, and property tests that draw the same examples every time."""

import os

import pytest
from hypothesis import HealthCheck, settings

from vafl.run.assembly import limited_threads

SLOW_START = [HealthCheck.too_slow]  # the first example includes torch's start-up

settings.register_profile(
    "ci", derandomize=True, database=None, deadline=None, max_examples=60, suppress_health_check=SLOW_START
)
settings.register_profile(
    "explore", database=None, deadline=None, max_examples=1000, suppress_health_check=SLOW_START
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items):
    """Property tests run the same lines many times: tracing them takes a minute and covers no other lines."""
    for item in items:
        if item.get_closest_marker("hypothesis"):
            item.add_marker("no_cover")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    with limited_threads(1):
        yield


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    """Remove VAFL_DATA, so that it does not influence a test."""
    monkeypatch.delenv("VAFL_DATA", raising=False)
