"""What the parties of a federation keep in files: there from the start, and never lost by accident."""

from dataclasses import asdict

import numpy as np
import pytest

from vafl.build import make_client, make_plan
from vafl.config import from_document
from vafl.errors import RunFolderError
from vafl.federation.client import ClientState, run_client
from vafl.federation.server import ServerState
from vafl.protocol.messages import Welcome
from vafl.runtime.checkpoint import load_checkpoint
from vafl.runtime.simulator import Traffic

CONFIG = from_document({"data": {"name": "iris"}, "network": {"security": "plaintext"}})


def test_a_client_killed_before_its_first_checkpoint_can_be_resumed(tmp_path):
    plan = make_plan(CONFIG)
    ClientState(make_client(plan, 0), tmp_path, 100, resume=False)
    client = make_client(plan, 0)
    ClientState(client, tmp_path, 100, resume=True)
    assert client.activation == 0


def test_a_server_killed_before_its_first_checkpoint_can_be_resumed(tmp_path):
    ServerState(make_plan(CONFIG), tmp_path, resume=False)
    assert ServerState(make_plan(CONFIG), tmp_path, resume=True).server.iteration == 0


def test_a_resumed_server_goes_on_counting(tmp_path):
    state = ServerState(make_plan(CONFIG), tmp_path, resume=False)
    state.server.delays.record(np.array([[0, 3], [0, 100_000]], dtype=np.int32), 0)
    account = {"seconds": 1.5, "traffic": [asdict(Traffic(1, 2, 3))] * 2, "violations": {"client-1": 4}}
    state.save(account)
    resumed = ServerState(make_plan(CONFIG), tmp_path, resume=True)
    assert resumed.server.delays.summaries() == state.server.delays.summaries()
    assert resumed.facts["account"] == account


def test_a_clients_checkpoint_is_not_replaced_by_accident(tmp_path):
    ClientState(make_client(make_plan(CONFIG), 0), tmp_path / "state" / "client-1", 100, resume=False)
    with pytest.raises(RunFolderError, match="--resume to go on from it, or --overwrite"):
        run_client(CONFIG, "client-1", tmp_path)


def test_a_client_saves_itself_when_the_server_has_gone_back(tmp_path):
    """Or its checkpoint would name an iteration that the server counts a second time."""
    client = make_client(make_plan(CONFIG), 0)
    client.iteration = 40
    state = ClientState(client, tmp_path, 100, resume=False)
    client.receive(Welcome(0, 30, (0, 0)))
    state.save_if_due()
    assert load_checkpoint(tmp_path)[1]["iteration"] == 30
