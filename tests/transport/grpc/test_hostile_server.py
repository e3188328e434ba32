"""A hostile server ends its client with one clear error and cannot damage the client's state.

A server that keeps asking and never reads the answers is held back by flow control.
"""

import asyncio
import logging
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest

from tests.transport.grpc.parties import Federation, complete, configuration, until
from vafl.errors import InvalidMessage
from vafl.protocol.messages import (
    Decline,
    Evaluate,
    Gradient,
    Refresh,
    Request,
    Skipped,
    Stop,
    Upload,
    Welcome,
)
from vafl.run.assembly import make_privacy
from vafl.transport.codec import Codec
from vafl.transport.grpc.admission import serve_streams
from vafl.transport.grpc.session import Session
from vafl.transport.grpc.wire import METHOD


async def told(*said):
    """Run a client whose server sends this; return its error or result, and the client."""

    async def stream(context):
        for _ in ("terms", "join"):
            await context.read()
        for message in said:
            await context.write(Codec().encode(message))
        while isinstance(await context.read(), bytes):
            pass

    return await told_by(stream)


async def told_by(stream, config=None, folder=None):
    """Run a client whose server serves this stream; return its error or result, and the client.

    The client is private as `config` says if there is a `folder` for its ledger.
    """
    federation = Federation(config or configuration())
    async with serve_streams(METHOD, stream, federation.config.network, None) as federation.address:
        privacy = make_privacy(federation.plan, 0, folder) if folder else None
        client = federation.client(0, privacy=privacy)
        (error,) = await asyncio.gather(client.run(), return_exceptions=True)
    return error, client.client


@pytest.mark.parametrize(
    "said",
    [
        [Welcome(0, 0, ())],
        [Welcome(0, 0, (0, 0, 0))],
        [Welcome(0, 0, (2**63, 0))],
        [Welcome(0, -5, (0, 0))],
        [Welcome(0, 0, (0, 0)), Skipped(0, 0, 0, (1,), "lost")],
    ],
)
def test_where_no_run_can_stand_is_the_server_s_fault_and_changes_nothing(said):
    error, client = complete(told(*said))
    assert isinstance(error, InvalidMessage), error
    assert error.code == "VFL-6095"
    assert "2 clients" in str(error)
    assert client.applied == 0
    assert client.iteration == -1


def test_a_second_welcome_on_a_stream_is_refused_and_changes_nothing():
    """If accepted, it would make the client repeat uploads, or move it to another place in the run."""
    error, client = complete(told(Welcome(0, 0, (0, 0)), Welcome(0, 0, (900, 0))))
    assert isinstance(error, InvalidMessage), error
    assert error.code == "VFL-6093"
    assert client.activation < 900


def test_one_huge_gradient_neither_destroys_the_model_nor_passes_unnoticed(caplog):
    """The first upload gets a normal gradient, the second one with a norm of about 1e31."""

    async def stream(context):
        for _ in ("terms", "join"):
            await context.read()
        await context.write(Codec().encode(Welcome(0, 0, (0, 0))))
        answered = 0
        while answered < 3:
            for frame in Codec().frames(await context.read()):
                upload = Codec().from_client(frame, 0)
                if isinstance(upload, Upload):
                    size = 1e30 if answered == 1 else 0.01
                    slopes = np.full(upload.embeddings.shape, size, np.float32)
                    own = Gradient(0, upload.activation, answered, slopes, (upload.activation + 1, 0))
                    await context.write(Codec().encode(own))
                    answered += 1
        await context.write(Codec().encode(Stop(0, "enough")))
        while isinstance(await context.read(), bytes):
            pass

    reason, client = complete(told_by(stream))
    assert reason == "enough"
    weights = next(client.model.parameters()).detach()
    assert 0.01 < float(weights.abs().max()) < 100
    assert "the server sent 1 gradients of norm up to" in caplog.text


class Deaf:
    """The stream of a server that sends 20 requests at a time, and reads no answer."""

    def __init__(self):
        self._said, self._asked, self._never = 0, 0, asyncio.Event()

    async def read(self):
        await asyncio.sleep(0)
        if not self._asked:
            self._asked = 1
            return Codec().encode(Welcome(0, 0, (0, 0)))
        numbers = range(self._asked, self._asked + 20)
        self._asked += 20
        (content,) = Codec().contents([Request(0, number, np.arange(100)) for number in numbers])
        return content

    async def write(self, content):
        self._said += 1
        if self._said > 2:  # the terms, and the join
            await self._never.wait()

    def cancel(self):
        pass


def test_answers_that_the_server_does_not_take_are_not_made(monkeypatch):
    """This holds for requests in one message and for messages already read, and the client can still end."""

    async def story():
        stream, federation = Deaf(), Federation(configuration())

        @asynccontextmanager
        async def dial(*_):
            yield stream

        monkeypatch.setattr("vafl.transport.grpc.client.dial", dial)
        federation.address, federation.overrides = "127.0.0.1:1", {"largest_message": 10_000}
        client, made = federation.client(0), []
        answer = client.client._answer
        client.client._answer = lambda request: made.append(request.number) or answer(request)
        running = asyncio.create_task(client.run())
        await until(lambda: len(made) > 5)
        await asyncio.sleep(0.3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return len(made)

    assert complete(story()) * 1648 <= 2 * 10_000 + 2 * 1648


HELD_OUT = np.array([149])  # in no minibatch


def private(**changes):
    """Every answer costs a record mu^2 1/4 of its budget of 1."""
    settings = {"clip": 1.0, "noise": 4.0, "gradient_clip": 1.0, "gradient_noise": 4.0, "mu_max": 1.0}
    return configuration(
        data={"name": "iris", "scale": "none"},
        model={"head": "linear"},
        schedule={"batch_size": 16, "refresh": "none"},
        privacy=settings | changes,
    )


def insisting(answers, times):
    """A server that keeps asking for one record, and answers no upload."""

    async def stream(context):
        for _ in ("terms", "join"):
            await context.read()
        await context.write(Codec().encode(Welcome(0, 0, (0, 0))))
        for number in range(times):
            await context.write(Codec().encode(Evaluate(0, number, HELD_OUT)))
        while len(answers) < times and isinstance(content := await context.read(), bytes):
            said = [Codec().from_client(frame, 0) for frame in Codec().frames(content)]
            answers.extend(each for each in said if isinstance(each, (Refresh, Decline)))
        await context.write(Codec().encode(Stop(0, "all was asked")))
        while isinstance(await context.read(), bytes):
            pass

    return stream


@pytest.mark.parametrize("mode", ["frozen", "dp_train"])
def test_a_server_that_asks_for_one_record_again_and_again_is_answered_up_to_the_budget(
    tmp_path, caplog, mode
):
    caplog.set_level(logging.INFO, "vafl.client")
    unused = {"gradient_clip": 0.0, "gradient_noise": 0.0} if mode == "frozen" else {}
    answers = []
    reason, _ = complete(told_by(insisting(answers, 50), private(mode=mode, **unused), tmp_path))
    assert reason == "all was asked"
    assert [type(answer) for answer in answers] == [Refresh] * 4 + [Decline] * 46
    warnings = [
        record.getMessage()
        for record in caplog.records
        if (record.name, record.levelname) == ("vafl.client", "WARNING")
    ]
    assert len(warnings) == 2, "each once a minute"
    assert "(evaluation) although the model has not changed" in warnings[0]
    assert "asked for 2 times; mu 0.7071 is spent on it, the budget is 1" in warnings[0]
    assert "the budget of mu 1 is spent" in warnings[1]


def test_without_a_budget_one_record_is_answered_for_at_the_pace(tmp_path, monkeypatch):
    monkeypatch.setattr("vafl.transport.grpc.pace.AT_ONCE", 5)
    monkeypatch.setattr("vafl.transport.grpc.pace.PER_SECOND", 50.0)
    answers, begin = [], time.monotonic()
    reason, _ = complete(told_by(insisting(answers, 25), private(mu_max="unlimited"), tmp_path))
    assert reason == "all was asked"
    assert [answer.request for answer in answers] == list(range(25))
    assert time.monotonic() - begin >= 20 / 50


def test_a_client_that_holds_back_an_answer_can_be_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("vafl.transport.grpc.pace.AT_ONCE", 3)
    monkeypatch.setattr("vafl.transport.grpc.pace.PER_SECOND", 1e-6)
    answers, held, pause = [], [], Session.pause

    async def story():
        telling = asyncio.create_task(told_by(insisting(answers, 5), private(mu_max="unlimited"), tmp_path))
        await until(lambda: len(answers) == 3 and held)
        telling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await telling

    monkeypatch.setattr(Session, "pause", lambda *given: held.append(given) or pause(*given))
    complete(story())
    assert len(answers) == 3
