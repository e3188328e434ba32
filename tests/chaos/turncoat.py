"""A party with a valid certificate that behaves for some rounds, and then tries everything else."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import grpc.aio

from tests.chaos.parties import Failed
from vafl.protocol.client import Client
from vafl.protocol.messages import Refused
from vafl.runtime.codec import Codec
from vafl.runtime.grpc.wire import MANY_VIOLATIONS, PATH
from vafl.runtime.identity import Credentials

_PATIENCE = 60.0  # seconds the server may take to answer anything


@dataclass
class Turncoat:
    """Speaks to a server by hand.

    Attributes:
        said: the frames it said while it behaved.
        tried: hostile messages, by kind.
        answers: what the server did about them.
    """

    address: str
    credentials: Credentials
    client: Client
    terms: bytes
    said: list[bytes] = field(default_factory=list)
    tried: Counter = field(default_factory=Counter)
    answers: Counter = field(default_factory=Counter)
    _codec: Codec = field(default_factory=Codec)

    def behave(self, rounds: int) -> None:
        """Takes part as it should; ends with nothing in flight."""
        asyncio.run(self._behave(rounds))

    def attack(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Says these frames, of these kinds, on as many streams as it takes; each must be refused."""
        asyncio.run(self._attack(frames))

    def knock(self, kind: str, times: int, frames: Sequence[bytes], **changes) -> None:
        """Opens so many streams that begin with these frames; each must end in an error.

        Args:
            changes: other credentials, or metadata.
        """
        asyncio.run(self._knock(kind, times, frames, **changes))

    @property
    def beginning(self) -> list[bytes]:
        """How a stream begins properly."""
        return [self.terms, self._codec.encode(self.client.join())]

    def _channel(self, credentials: Credentials) -> grpc.aio.Channel:
        options = [("grpc.max_send_message_length", -1), *credentials.channel_options()]
        return grpc.aio.secure_channel(self.address, credentials.channel_credentials(), options)

    async def _behave(self, rounds: int) -> None:
        async with self._channel(self.credentials) as channel:
            stream = channel.stream_stream(PATH)()
            await _write(stream, self.beginning)
            while self.client.applied < rounds:
                content = await asyncio.wait_for(stream.read(), _PATIENCE)
                said = self.client.receive(self._codec.from_server(content, self.client.index))
                if not self.client.waiting and self.client.activation < rounds:
                    said += self.client.wake()
                frames = [self._codec.encode(message) for message in said]
                self.said += frames
                await _write(stream, frames)

    async def _attack(self, frames: Sequence[tuple[str, bytes]]) -> None:
        async with self._channel(self.credentials) as channel:
            for start in range(0, len(frames), MANY_VIOLATIONS):
                part = frames[start : start + MANY_VIOLATIONS]
                await asyncio.wait_for(self._attack_once(channel, [frame for _, frame in part]), _PATIENCE)
                self.tried.update(kind for kind, _ in part)
                self.answers["refused"] += len(part)

    async def _attack_once(self, channel: grpc.aio.Channel, frames: Sequence[bytes]) -> None:
        stream = channel.stream_stream(PATH)()
        writing = asyncio.create_task(_write(stream, [*self.beginning, *frames]))
        refusals = 0
        while refusals < len(frames):
            content = await stream.read()
            if content is grpc.aio.EOF:
                raise Failed(f"the server refused {refusals} of {len(frames)} hostile messages and closed")
            refusals += isinstance(self._codec.from_server(content, self.client.index), Refused)
        await writing
        stream.cancel()

    async def _knock(self, kind, times, frames, credentials=None, metadata=()) -> None:
        async with self._channel(credentials or self.credentials) as channel:
            for _ in range(times):
                stream = channel.stream_stream(PATH)(metadata=metadata)
                code = await asyncio.wait_for(_ending(stream, frames), _PATIENCE)
                if code is grpc.StatusCode.OK:
                    raise Failed(f"the server closed a stream of {kind} messages without a word")
                self.tried[kind] += 1
                self.answers[code.name] += 1


async def _write(stream, frames: Sequence[bytes]) -> None:
    for frame in frames:
        await stream.write(frame)


async def _ending(stream, frames: Sequence[bytes]) -> grpc.StatusCode:
    """How a stream ends that begins with these frames."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await _write(stream, frames)
        while await stream.read() is not grpc.aio.EOF:
            pass
    return await stream.code()
