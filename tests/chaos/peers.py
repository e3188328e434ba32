"""Peers that send false messages, freeze, fall silent or run twice, in a federation of real processes.

Every scenario ends in the same way: the honest processes must reach the end of the run by themselves, with a
model, and the server's trace must show that no durable upload was lost and none applied twice.
"""

import asyncio
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
from safetensors.numpy import load_file

from tests.chaos.history import read_history
from tests.chaos.kills import outcome, training
from tests.chaos.parties import Failed, Parties, Place
from vafl.config import read_config
from vafl.errors import LedgerError
from vafl.privacy.ledger.ledger import read_ledger
from vafl.protocol.messages import Gradient, Join, Refused, Upload, Welcome
from vafl.run.agreement import STATE, make_terms
from vafl.run.plan import make_plan
from vafl.transport.codec import Codec
from vafl.transport.grpc.admission import identify, serve_streams
from vafl.transport.grpc.wire import METHOD, PATH
from vafl.transport.identity import SERVER, Credentials

NAME, INDEX = "client-4", 3
CLAIM = 2**62
HUGE = 1e30
SOON = 20.0  # seconds: three heartbeats of 2 s, and time for a busy machine; gRPC alone takes 60 s
ANSWERS = 40  # gradients of a hostile server

Mistreatment = Callable[[Parties], dict]


def running(updates: int, *, private: bool = False) -> dict:
    """Return the configuration of a run of four clients that is long enough for a scenario."""
    document = training(updates, pause=0.02, rule={"name": "async", "window": 2})  # no party waits for a peer
    document["network"] |= {"join_timeout": 10.0, "answer_timeout": 3.0}
    if private:
        document |= {"privacy": PRIVACY}
        document["data"]["scale"] = "none"
    return document


def survive(folder: Path, document: dict, mistreat: Mistreatment, limit: float) -> dict:
    """Run a federation under a scenario; return what was done and how the run ended."""
    with Parties(folder, document, Place.here(), limit) as parties:
        done = mistreat(parties)
        parties.until_over()
        return {**done, "metric": parties.metric(), **outcome(read_history(parties.trace))}


# --- a client that sends false messages, or none ---


def claim_too_much(parties: Parties) -> dict:
    """Before client-4 starts, join in its name and claim 2^62 uploads. Then kill and resume the server: its
    checkpoint must not be poisoned either."""
    _start_without(parties, NAME)
    codec, refusals = Codec(), 0
    for _ in range(20):
        heard = asyncio.run(_say(parties, [codec.encode(Join(INDEX, activation=CLAIM, applied=CLAIM))]))
        refusals += any(isinstance(message, Refused) for message in heard)
    parties.until(lambda: parties.updates() > 200, "200 updates of the others")
    parties.kill(SERVER)
    parties.start(SERVER, resume=True)
    parties.start(NAME)
    wrong = [f"{refusals} of 20 claims were refused"] * (refusals < 20)
    return {"done": f"{refusals} joins that claim 2^62 uploads were refused", "wrong": wrong}


def say_nothing(parties: Parties) -> dict:
    """Join as client-4, answer the pings, and never answer a request, until the run is over."""
    _start_without(parties, NAME)
    join = [Codec().encode(Join(INDEX))]
    asyncio.run(_say(parties, join, until=lambda: parties.over() or _someone_failed(parties)))
    seen = parties.log(SERVER).count("did not answer a request")
    wrong = ["the server did not report the silent client"] * (not seen)
    done = f"the others went on, {seen} requests expired"
    return {"done": done, "wrong": wrong, "tolerated": 0.05}  # a quarter of the features is missing


# --- a server that sends false gradients ---


def exaggerate(parties: Parties) -> dict:
    """Kill the server, take its place, and answer every upload with a gradient of 1e30. Then the real server
    comes back."""
    parties.start_all()
    parties.until(lambda: parties.updates() > 200, "200 updates")
    parties.kill(SERVER)
    answered = asyncio.run(_lie(parties))
    broken = [name for name in parties.clients if not _finite(parties, name)]
    parties.start(SERVER, resume=True)
    wrong = [f"the checkpoint of {name} holds values that are not finite" for name in broken]
    told = sum("gradients of norm up to" in parties.log(name) for name in parties.clients)
    wrong += ["no client reported the gradients"] * (not told)
    return {"done": f"{answered} gradients of 1e30, reported by {told} clients", "wrong": wrong}


# --- frozen and doubled processes ---


def freeze(victim: str) -> Mistreatment:
    """Stop a process by SIGSTOP until its peers have noticed, then let it go on."""

    def mistreat(parties: Parties) -> dict:
        parties.start_all()
        parties.until(lambda: parties.updates() > 200, "200 updates")
        process, began, before = parties.processes[victim], time.monotonic(), parties.updates()
        watchers, words = (
            ([SERVER], f"{victim} is gone") if victim != SERVER else (parties.clients, "out of reach")
        )
        process.send_signal(signal.SIGSTOP)
        try:
            for name in watchers:
                parties.until(lambda name=name: words in parties.log(name), f'"{words}" in the log of {name}')
            seconds = time.monotonic() - began
            meanwhile = parties.updates() - before
        finally:
            process.send_signal(signal.SIGCONT)
        wrong = [f"noticed after {seconds:.0f} s only"] * (seconds > SOON)
        wrong += ["the others stood still"] * (victim != SERVER and not meanwhile)
        return {"done": f"noticed after {seconds:.1f} s, {meanwhile} updates meanwhile", "wrong": wrong}

    return mistreat


def double(parties: Parties) -> dict:
    """Start client-4 a second time in another folder, without --replace, while the first one works."""
    parties.start_all()
    parties.until(lambda: parties.updates() > 200, "200 updates")
    other = Path(f"{parties.folder}-double")
    done = subprocess.run(
        parties.command(NAME, other), capture_output=True, text=True, timeout=parties.limit, check=False
    )
    wrong = ["the second process was not refused"] * (
        done.returncode == 0 or "--replace" not in done.stderr + done.stdout
    )
    return {"done": f"a second process was refused with exit code {done.returncode}", "wrong": wrong}


def roll_back(parties: Parties) -> dict:
    """Restore the ledger of client-4 and its head from a backup, as an attacker would who wants more answers.
    Then put the current files back."""
    parties.start_all()
    own, kept = parties.folder / NAME / "privacy", parties.folder / "kept"
    marks = parties.folder / SERVER / STATE / "server.marks"
    parties.until(lambda: marks.exists() and NAME in marks.read_text(), "the first mark")
    parties.kill(NAME)
    shutil.copytree(own, backup := parties.folder / "backup")
    older = read_ledger(backup / f"{NAME}.ledger")
    parties.start(NAME, resume=True)
    parties.until(lambda: not older.knows(_mark(marks)), "a mark that the backup lacks")
    parties.kill(NAME)
    own.rename(kept)
    shutil.copytree(backup, own)
    parties.start(NAME, resume=True)
    code = parties.processes.pop(NAME).wait(parties.limit)
    charged = read_ledger(own / f"{NAME}.ledger").counts.sum() - older.counts.sum()
    shutil.rmtree(own)
    kept.rename(own)
    parties.start(NAME, resume=True)
    wrong = [f"the client ended with {code} instead of {LedgerError.exit_code}"] * (
        code != LedgerError.exit_code
    )
    wrong += [f"{charged} charges on the old ledger"] * bool(charged)
    done = f"the old ledger was refused with exit code {code}"
    return {"done": done, "wrong": wrong, "tolerated": 0.03}  # noise alone moves the metric by 0.01


def _mark(path: Path) -> bytes:
    return bytes.fromhex(json.loads(path.read_text())["marks"][NAME])


PRIVACY = {"clip": 4.0, "noise": 0.02, "gradient_clip": 1.0, "gradient_noise": 0.02, "mu_max": "unlimited"}

PEERS: dict[str, Mistreatment] = {
    "hostile client": claim_too_much,
    "silent client": say_nothing,
    "hostile server": exaggerate,
    "frozen client": freeze("client-2"),
    "frozen server": freeze(SERVER),
    "second process": double,
    "ledger rollback": roll_back,
}


# --- streams whose messages the scenario sends ---


def _start_without(parties: Parties, absent: str) -> None:
    for party in (SERVER, *parties.clients):
        if party != absent:
            parties.start(party)
    parties.until(lambda: "listening" in parties.log(SERVER), "the server")


def _someone_failed(parties: Parties) -> bool:
    return any(process.poll() for process in parties.processes.values())


async def _say(parties: Parties, frames: list[bytes], until: Callable[[], bool] = lambda: True) -> list:
    """Open a stream as client-4, send these frames, read until `until` is true, and return what was heard."""
    config = read_config(parties.folder / "run.toml")
    plan, codec = make_plan(config), Codec()
    credentials = Credentials.load(parties.folder / "certs" / NAME, NAME)
    options = credentials.channel_options()
    heard: list = []
    async with grpc.aio.secure_channel(
        config.network.address, credentials.channel_credentials(), options
    ) as channel:
        stream = channel.stream_stream(PATH)()
        for frame in (make_terms(plan).to_bytes(), *frames):
            await stream.write(frame)
        deadline = time.monotonic() + parties.limit
        with suppress(grpc.aio.AioRpcError):
            while not (heard and until()):
                content = await asyncio.wait_for(stream.read(), deadline - time.monotonic())
                if content is grpc.aio.EOF:
                    break
                heard += [codec.from_server(frame, INDEX) for frame in codec.frames(content)]
    return heard


async def _lie(parties: Parties) -> int:
    """Serve at the server's address, with its certificate, until ANSWERS uploads have got a huge gradient."""
    config, answered, enough = read_config(parties.folder / "run.toml"), 0, asyncio.Event()
    credentials = Credentials.load(parties.folder / "certs" / SERVER, SERVER)

    async def answer(context: grpc.aio.ServicerContext) -> None:
        nonlocal answered
        codec, index = Codec(), parties.clients.index(identify(context, credentials, parties.clients))
        await context.read()  # its terms
        join = codec.from_client(next(iter(codec.frames(await context.read()))), index)
        activations = (join.applied,) * len(parties.clients)
        await context.write(codec.encode(Welcome(index, join.iteration + 1, activations)))
        while isinstance(content := await context.read(), bytes):
            for frame in codec.frames(content):
                said = codec.from_client(frame, index)
                if isinstance(said, Upload):
                    slopes = np.full(said.embeddings.shape, HUGE, np.float32)
                    counts = (said.activation + 1,) * len(parties.clients)
                    iteration = join.iteration + 1 + answered
                    gradient = Gradient(index, said.activation, iteration, slopes, counts)
                    await context.write(codec.encode(gradient))
                    answered += 1
                    if answered >= ANSWERS:
                        enough.set()

    async with serve_streams(METHOD, answer, config.network, credentials):
        try:
            await asyncio.wait_for(enough.wait(), parties.limit)
        except TimeoutError:
            words = f"hang: the clients took {answered} of {ANSWERS} gradients; {parties.state()}"
            raise Failed(words) from None
    return answered


def _finite(parties: Parties, name: str) -> bool:
    """Return whether the last checkpoint of a client has only finite parameters."""
    (path,) = (parties.folder / name / STATE / name).glob("*.safetensors")
    return all(np.isfinite(tensor).all() for tensor in load_file(path).values() if tensor.dtype.kind == "f")
