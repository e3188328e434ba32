"""A server waits less long for clients that are gone for good."""

import pytest


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr("vafl.runtime.grpc.server._GRACE", 1.0)
