"""The chaos suites themselves, on a small scale; `make chaos` runs them in full."""

from tests.chaos.certificates import impostors, refused
from tests.chaos.kills import training
from tests.chaos.parties import Parties, Place
from vafl.runtime.identity import SERVER


def test_a_live_server_refuses_every_wrong_certificate_and_both_sides_say_why(tmp_path):
    with Parties(tmp_path / "run", training(100, clients=2), Place.here(), limit=60) as parties:
        parties.start(SERVER)
        parties.until(lambda: "listening" in parties.log(SERVER), "the server")
        for impostor in impostors(parties):
            found = refused(parties, impostor)
            assert found["refused"], found
