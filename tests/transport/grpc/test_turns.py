"""When a client sends what: brief uploads are sent together, long ones as soon as they are made."""

import numpy as np
import pytest

from tests.transport.grpc.parties import configuration
from vafl.protocol.messages import Gradient, Skipped, Upload, Welcome
from vafl.run.agreement import make_terms
from vafl.run.assembly import make_client
from vafl.run.plan import make_plan
from vafl.transport.codec import Codec
from vafl.transport.grpc.client import FederationClient

WINDOW = 3


class Place:
    """A fake worker that runs in a thread, where work may wait, or on the event loop."""

    def __init__(self, may_wait):
        self.may_wait = may_wait

    def worked(self):
        return 0.0

    def tell(self, function, *arguments):
        function(*arguments)

    def do(self, work):
        work()


class Stream:
    """A fake session that records what is sent."""

    def __init__(self):
        self.welcome, self.answered, self.said, self.alarms = False, 0, [], []

    def send(self, contents, *, handled=False):
        self.said += contents

    def wake_after(self, pause, awake):
        self.alarms.append(awake)

    def take(self):
        """Return the number of uploads in each content that was sent since the last call."""
        taken, self.said = self.said, []
        frames = [Codec().frames(content) for content in taken]
        uploads = [[Codec().from_client(frame, 0) for frame in own] for own in frames]
        assert all(isinstance(message, Upload) for own in uploads for message in own)
        return [len(own) for own in uploads]


class Party:
    """A client of a run, whose server is played by the test."""

    def __init__(self, *, clients=2, may_wait=False):
        settings = {"rule": {"window": WINDOW}, "schedule": {"batch_size": 16, "refresh": "none"}}
        plan = make_plan(configuration(partition={"clients": clients}, **settings))
        self.clients, self.stream = clients, Stream()
        terms = make_terms(plan)
        self.end = FederationClient(make_client(plan, 0), "client-1", terms, plan.config.network, None)
        self.end._worker = Place(may_wait)
        self.receives(Welcome(0, 0, (0,) * clients, 0, 0))

    def receives(self, *messages):
        for content in Codec().contents(messages):
            self.end._receive(self.stream, content)

    def answer(self, activation):
        return Gradient(0, activation, activation, np.zeros((16, 3), np.float32), (0,) * self.clients)


def test_brief_uploads_go_together_once_all_answers_are_here():
    party = Party()
    assert party.stream.take() == [WINDOW]
    party.receives(party.answer(0))
    party.receives(party.answer(1))
    assert party.stream.take() == [], "the server has yet to answer the third"
    party.receives(party.answer(2))
    assert party.stream.take() == [WINDOW]
    party.receives(*map(party.answer, (3, 4, 5)))
    assert party.stream.take() == [WINDOW]
    assert not party.stream.alarms, "nothing but an answer is waited for"


@pytest.mark.parametrize("party", [{"may_wait": True}, {"clients": 1}], ids=["long work", "one client"])
def test_others_go_as_soon_as_there_is_room(party):
    party = Party(**party)
    assert party.stream.take() == [WINDOW]
    for activation in range(3):
        party.receives(party.answer(activation))
        assert party.stream.take() == [1]


def test_after_a_skip_a_client_pauses_and_then_goes_on():
    party = Party()
    assert party.stream.take() == [WINDOW]
    party.receives(Skipped(0, 0, 0, (0,) * party.clients, "no"))
    assert party.stream.take() == []
    (awake,) = party.stream.alarms
    awake()
    assert party.stream.take() == [1]
