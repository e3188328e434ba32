"""Messages that a server must refuse: mutated, truncated, repeated, sent for others, or not finite."""

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vafl.errors import InvalidMessage
from vafl.protocol.client import Client
from vafl.protocol.messages import (
    Decline,
    Gradient,
    Join,
    Query,
    Refresh,
    Stop,
    Upload,
    Welcome,
)
from vafl.protocol.server import Server
from vafl.protocol.table import EmbeddingTable
from vafl.run.assembly import make_client, make_server, widths
from vafl.run.plan import Plan
from vafl.transport.codec import HEADER_BYTES, Codec
from vafl.transport.encodings import Frame

KINDS = ("malformed", "truncated", "replayed", "wrong party", "not finite", "against the rules", "together")
_SIZES_AT = 32  # where the header has the numbers of rows, columns, counters and bytes of text
_ODD = 0x5A5A5A5A  # a number that no client may use now


@dataclass(frozen=True)
class Weapon:
    """Bytes that the server must refuse.

    Attributes:
        refusals: the number of frames that the server finds in them and refuses.
    """

    kind: str
    content: bytes
    refusals: int


class Armoury:
    """Generates hostile messages of all kinds for one client, without end. The seed determines them.

    A separate server at the same point of the run decides whether each message is really hostile. A mutation
    may happen to be a message that this client may send; such messages are dropped.

    Args:
        said: frames that this client has sent before, and the server has accepted.
    """

    def __init__(self, plan: Plan, client: Client, said: Sequence[bytes], largest_norm: float, seed: int):
        self._plan, self._client, self._said, self._norm = plan, client, list(said), largest_norm
        self._chance, self._numbers, self._codec = random.Random(seed), np.random.default_rng(seed), Codec()
        self._width = widths(plan)[client.index]
        self._others = [
            make_client(plan, i).wake() for i in range(len(plan.data.parties)) if i != client.index
        ]
        self._judge = self._make_judge()

    def weapons(self) -> Iterator[Weapon]:
        makers = (
            self._malformed,
            self._truncated,
            lambda: self._chance.choice(self._said),
            self._wrong_party,
            self._not_finite,
            self._against_the_rules,
            self._together,
        )
        while True:
            kind, make = self._chance.choice(list(zip(KINDS, makers, strict=True)))
            content = make()
            refusals = self._refusals(content)
            if refusals:
                yield Weapon(kind, content, refusals)

    def _make_judge(self) -> Server:
        rows = self._plan.data.parts.total
        server = make_server(self._plan, EmbeddingTable(rows, widths(self._plan), summed=True))
        join = self._client.join()
        # Like a server that was restored from a checkpoint at the start of the run: it accepts this join.
        nothing = [0] * len(self._plan.data.parties)
        server.restore(0, nothing, server.descent.state(), forgettable=join.applied)
        server.receive(join)
        return server

    def _refusals(self, content: bytes) -> int:
        """Return how many frames of this content are refused; 0 if any frame is accepted."""
        try:
            frames = self._codec.frames(content)
        except InvalidMessage:
            return 1
        return 0 if any(self._is_allowed(frame) for frame in frames) else len(frames)

    def _is_allowed(self, frame: Frame) -> bool:
        try:
            message = self._codec.from_client(frame, self._client.index)
            embeddings = getattr(message, "embeddings", np.zeros((0, 1), np.float32)).astype(float)
            if isinstance(message, Join) or (np.linalg.norm(embeddings, axis=1) > self._norm).any():
                return False
            self._judge.receive(message)
        except InvalidMessage:
            return False
        self._judge = self._make_judge()
        return True

    def _upload(self, **changes) -> Upload:
        """Return this client's next upload, with these changes."""
        rows = self._client._schedule.batch(self._client.activation)
        shape = len(changes.get("rows", rows)), self._width
        fields = {
            "client": self._client.index,
            "sequence": 1,
            "activation": self._client.activation,
            "rows": rows,
            "embeddings": self._numbers.normal(size=shape).astype(np.float32),
            **changes,
        }
        return Upload(**fields)

    def _some(self) -> bytes:
        """Return a well-formed frame of any kind that clients send."""
        rows = np.arange(self._chance.randrange(1, 64))
        messages = (
            self._upload(),
            Refresh(self._client.index, 1, rows, np.zeros((len(rows), self._width), np.float32), _ODD),
            Query(self._client.index, 1, _ODD),
            Decline(self._client.index, 1, _ODD, "no"),
        )
        return self._codec.encode(self._chance.choice(messages))

    def _malformed(self) -> bytes:
        """Return flipped bytes, false lengths, a header without content, or random bytes."""
        frame = bytearray(self._some())
        way = self._chance.randrange(4)
        if way == 0:
            for _ in range(self._chance.randrange(1, 9)):
                frame[self._chance.randrange(len(frame))] ^= 1 << self._chance.randrange(8)
        elif way == 1:
            lie = self._chance.choice((0, 1, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF))
            struct.pack_into("<I", frame, _SIZES_AT + 4 * self._chance.randrange(4), lie)
        elif way == 2:
            frame = frame[:HEADER_BYTES]
            struct.pack_into("<4I", frame, _SIZES_AT, 0, self._chance.randrange(4), 0, 0)
        else:
            frame = bytearray(self._chance.randbytes(self._chance.randrange(1, 600)))
        return bytes(frame)

    def _truncated(self) -> bytes:
        """Return a frame that is truncated anywhere, or has extra bytes."""
        frame = self._some()
        if self._chance.random() < 0.2:
            return frame + self._chance.randbytes(self._chance.randrange(1, 64))
        return frame[: self._chance.randrange(1, len(frame))]

    def _wrong_party(self) -> bytes:
        """Return a message that another client could send, or one that only a server sends."""
        if self._chance.random() < 0.5:
            return self._codec.encode(self._chance.choice(self._chance.choice(self._others)))
        mine, counts = self._client.index, (1,) * len(self._plan.data.parties)
        messages = (
            Welcome(mine, 1, counts),
            Gradient(mine, 0, 1, np.zeros((2, 3), np.float32), counts),
            Stop(mine, "!"),
        )
        return self._codec.encode(self._chance.choice(messages))

    def _not_finite(self) -> bytes:
        """Return the due upload with a value that is not finite."""
        frame = bytearray(self._codec.encode(self._upload()))
        bad = self._chance.choice((float("nan"), float("inf"), float("-inf"), 2 * self._norm))
        columns = len(frame) // 4 - 1
        struct.pack_into("<f", frame, 4 * self._chance.randrange(columns - 8 * self._width, columns), bad)
        return bytes(frame)

    def _against_the_rules(self) -> bytes:
        """Return a message that is well-formed and finite, but not allowed now."""
        mine, rows, number = self._client.index, self._plan.data.rows, self._chance.randrange(1, 1 << 40)
        some = np.array(sorted(self._chance.sample(range(rows), 8)))
        messages = (
            lambda: self._upload(rows=np.concatenate([some, some[:1]])),  # a row twice
            lambda: self._upload(rows=some + rows),  # held-out rows
            lambda: self._upload(rows=some + (1 << 30)),
            lambda: self._upload(activation=self._client.activation + number),
            lambda: self._upload(rows=some, embeddings=np.zeros((8, self._width + 1), np.float32)),
            lambda: Refresh(mine, 1, some, np.zeros((8, self._width), np.float32), number),
            lambda: Decline(mine, 1, number, "no" * 300),
            lambda: Query(mine, 1, number),
            self._client.join,  # a second time
        )
        return self._codec.encode(self._chance.choice(messages)())

    def _together(self) -> bytes:
        """Return several frames at once; sometimes more than one message may hold."""
        count = 200 if self._chance.random() < 0.05 else self._chance.randrange(2, 6)
        makers = (self._not_finite, self._against_the_rules, self._wrong_party)
        return b"".join(self._chance.choice(makers)() for _ in range(count))
