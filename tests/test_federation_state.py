"""What the parties of a federation keep in files: there from the start, and never lost by accident."""

import pytest

from vafl.build import make_client, make_plan
from vafl.config import from_document
from vafl.errors import RunFolderError
from vafl.federation.client import ClientState, run_client
from vafl.federation.server import ServerState

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


def test_a_clients_checkpoint_is_not_replaced_by_accident(tmp_path):
    ClientState(make_client(make_plan(CONFIG), 0), tmp_path / "state" / "client-1", 100, resume=False)
    with pytest.raises(RunFolderError, match="--resume to go on from it, or --overwrite"):
        run_client(CONFIG, "client-1", tmp_path)
