"""A party with a valid certificate that behaves for some rounds, and then attacks."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import grpc.aio

from tests.chaos.frames import Weapon
from tests.chaos.parties import Failed
from vafl.protocol.client import Client
from vafl.protocol.messages import Refused, ServerMessage
from vafl.transport.codec import Codec
from vafl.transport.grpc.wire import MANY_VIOLATIONS, PATH
from vafl.transport.identity import Credentials

_PATIENCE = 60.0  # seconds for the server to answer any message


@dataclass
class Turncoat:
    """Sends a server messages that a test makes.

    Attributes:
        said: the frames that it sent while it behaved.
        tried: hostile messages, by kind.
        answers: how the server reacted to them.
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
        """Take part like a regular client; return with nothing in flight."""
        asyncio.run(self._behave(rounds))

    def attack(self, weapons: Sequence[Weapon]) -> None:
        """Send all these messages, on as many streams as necessary. The server must refuse each frame."""
        asyncio.run(self._attack(weapons))

    def knock(self, kind: str, times: int, frames: Sequence[bytes], **changes) -> None:
        """Open `times` streams that begin with these frames; each must end with an error.

        Args:
            changes: other credentials, or metadata.
        """
        asyncio.run(self._knock(kind, times, frames, **changes))

    @property
    def beginning(self) -> list[bytes]:
        """Return the first messages of a valid stream."""
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
                said = [said for heard in self._messages(content) for said in self.client.receive(heard)]
                if not self.client.waiting and self.client.activation < rounds:
                    said += self.client.wake()
                frames = [self._codec.encode(message) for message in said]
                self.said += frames
                await _write(stream, frames)

    def _messages(self, content: bytes) -> list[ServerMessage]:
        return [self._codec.from_server(frame, self.client.index) for frame in self._codec.frames(content)]

    async def _attack(self, weapons: Sequence[Weapon]) -> None:
        async with self._channel(self.credentials) as channel:
            volley: list[Weapon] = []
            for weapon in weapons:
                volley.append(weapon)
                if sum(each.refusals for each in volley) >= MANY_VIOLATIONS:
                    await asyncio.wait_for(self._fire(channel, volley), _PATIENCE)
                    volley = []
            await asyncio.wait_for(self._fire(channel, volley), _PATIENCE)

    async def _fire(self, channel: grpc.aio.Channel, volley: Sequence[Weapon]) -> None:
        """Send as many hostile messages as the server tolerates on one stream."""
        stream, expected = channel.stream_stream(PATH)(), sum(weapon.refusals for weapon in volley)
        contents = [*self.beginning, *(weapon.content for weapon in volley)]
        writing = asyncio.create_task(_write(stream, contents))
        refusals = 0
        while refusals < expected:
            content = await stream.read()
            if content is grpc.aio.EOF:
                raise Failed(f"the server refused {refusals} of {expected} hostile messages and closed")
            refusals += sum(isinstance(message, Refused) for message in self._messages(content))
        await writing
        stream.cancel()
        for weapon in volley:
            self.tried[weapon.kind] += weapon.refusals
        self.answers["refused"] += refusals

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
    """Return the status of a stream that begins with these frames."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await _write(stream, frames)
        while await stream.read() is not grpc.aio.EOF:
            pass
    return await stream.code()
