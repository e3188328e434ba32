"""The one serialisation: a message as a frame of bytes, and a frame checked and read back.

What is said to a party at one time travels as one content: frames, one after the other. A frame is a
header of 48 bytes, then what its kind of message has of these: rows (unsigned 32 bit), a matrix (in the
run's encoding, or 64-bit words), counters (64 bit), text or bytes. Every length is checked against the
frame's own before anything is allocated; nothing is ever unpickled. The party that speaks is not in the
frame: whoever reads it knows that from the connection.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from vafl.errors import ConfigError, InvalidMessage
from vafl.protocol.messages import (
    HEADER_BYTES,
    ROW_BYTES,
    ClientMessage,
    Decline,
    Durable,
    Evaluate,
    Finished,
    Gradient,
    Join,
    Keys,
    LedgerMark,
    MaskedRefresh,
    MaskedUpload,
    Offer,
    Query,
    Refresh,
    Refused,
    Rekey,
    Request,
    ServerMessage,
    Skipped,
    Stop,
    Upload,
    Welcome,
)
from vafl.protocol.rows import Matrix
from vafl.transport.encodings import PACKING, Frame, Parts, matrix_bytes
from vafl.transport.settings import ENCODINGS, Encoding

Message = ClientMessage | ServerMessage
LONGEST_TEXT = 1024
MOST_FRAMES = 128  # that travel together

_BEGINNING = b"VF\2"  # the last is the version
# beginning, kind, encoding, flag, 2 spare; three numbers; lines, width, counters, bytes of text
_HEADER = struct.Struct("<3sBBBxxqqqIIII")
_SIZES, _SIZES_AT, _KIND_AT = struct.Struct("<IIII"), 32, 3
_ROW, _NUMBER = np.dtype("<u4"), np.dtype("<i8")


@dataclass(frozen=True)
class _Layout:
    """Which fields of a message travel where.

    `words` is a matrix of 64-bit words; `content` is bytes, and `contents` several of them, whose lengths
    are counters.
    """

    numbers: tuple[str, ...] = ()
    flag: str = ""
    rows: str = ""
    matrix: str = ""
    words: str = ""
    counters: str = ""
    text: str = ""
    content: str = ""
    contents: str = ""

    @cached_property
    def counts(self) -> bool:
        """Whether there are counters."""
        return bool(self.counters or self.contents)

    @cached_property
    def ends_freely(self) -> bool:
        """Whether there is text, or bytes, at the end."""
        return bool(self.text or self.content or self.contents)

    def bytes_of(self, encoding: Encoding) -> tuple[int, int, int, int]:
        """Of each line, each of a line's values, each counter and each byte of text; 0 of what it has not."""
        line, value = ROW_BYTES * bool(self.rows), 8 * bool(self.words)
        if self.matrix:
            scale = matrix_bytes(encoding, 1, 0)
            line, value = line + scale, matrix_bytes(encoding, 1, 1) - scale
        return line, value, 8 * self.counts, int(self.ends_freely)


_LAYOUTS: dict[type[Message], _Layout] = {
    Join: _Layout(("activation", "applied", "iteration"), contents="groups"),
    Upload: _Layout(("sequence", "activation", "in_flight"), flag="answer", rows="rows", matrix="embeddings"),
    Refresh: _Layout(("sequence", "request", "in_flight"), rows="rows", matrix="embeddings"),
    Query: _Layout(("sequence", "activation")),
    Decline: _Layout(("sequence", "request"), text="reason"),
    Finished: _Layout(("sequence",), text="reason"),
    Welcome: _Layout(("iteration", "durable", "run"), counters="activations", content="mark"),
    Gradient: _Layout(("activation", "iteration"), matrix="gradients", counters="activations"),
    Skipped: _Layout(("activation", "iteration"), counters="activations", text="reason"),
    Request: _Layout(("number",), rows="rows", text="permute"),
    Evaluate: _Layout(("number", "best"), flag="restore", rows="rows"),
    Durable: _Layout(("activation",)),
    Stop: _Layout(flag="failed", text="reason"),
    Refused: _Layout(text="reason"),
    Offer: _Layout(("sequence", "epoch"), content="offer"),
    MaskedUpload: _Layout(("sequence", "epoch", "activation"), rows="rows", words="words"),
    MaskedRefresh: _Layout(("sequence", "epoch", "request"), rows="rows", words="words"),
    Rekey: _Layout(("epoch",), text="reason"),
    Keys: _Layout(("epoch",), contents="offers"),
    LedgerMark: _Layout(("sequence",), content="mark"),
}
_KINDS = tuple(_LAYOUTS)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_FROM_CLIENT = frozenset(
    (Join, Upload, Refresh, Query, Decline, Finished, Offer, MaskedUpload, MaskedRefresh, LedgerMark)
)
_FROM_SERVER = frozenset(_KINDS) - _FROM_CLIENT


class Codec:
    """Writes and reads frames.

    Args:
        encoding: how matrices travel; `int8` has one float32 scale a row.
        largest: bytes that a frame, or what travels together, may have.
    """

    def __init__(self, encoding: Encoding = "float32", largest: int = 64 << 20) -> None:
        if encoding not in ENCODINGS:
            raise ConfigError(
                "VFL-6071", f"an encoding must be one of {', '.join(ENCODINGS)}. Found {encoding!r}."
            )
        self.encoding, self.largest = encoding, largest
        self._number = ENCODINGS.index(encoding)
        self._pack, self._unpack = PACKING[encoding]
        self._bytes = [layout.bytes_of(encoding) for layout in _LAYOUTS.values()]

    def size(self, message: Message) -> int:
        """The bytes of a message's frame, without making it."""
        layout = _LAYOUTS[type(message)]
        if self.encoding == "float32" or not layout.matrix:
            return message.nbytes
        matrix: Matrix = getattr(message, layout.matrix)
        return message.nbytes - matrix.nbytes + matrix_bytes(self.encoding, *matrix.shape)

    def most_rows(self, width: int, *, masked: bool = False) -> int:
        """How many rows of embeddings, or of masked words, fit into one frame.

        Raises:
            ConfigError: not even one does.
        """
        size = ROW_BYTES + (8 * width if masked else matrix_bytes(self.encoding, 1, width))
        if HEADER_BYTES + size > self.largest:
            raise ConfigError(
                "VFL-6072",
                f"network.largest_message must allow one row's embedding, {HEADER_BYTES + size:,} bytes. "
                f"Found {self.largest:,}. Raise it at every party.",
            )
        return (self.largest - HEADER_BYTES) // size

    def encode(self, message: Message) -> bytes:
        """The frame of a message.

        Raises:
            ConfigError: it is too large; sent, it would only be refused, again after every new connection.
        """
        parts: Parts = []
        self._encode(message, parts)
        frame = b"".join(parts)
        if len(frame) > self.largest:
            raise ConfigError(
                "VFL-6073",
                f"every message must fit into network.largest_message, {self.largest:,} bytes. Found one of "
                f"{len(frame):,}, {type(message).__name__}. Raise it at every party, or have less said at a "
                "time: schedule.batch_size, or prediction.chunk where a model is used.",
            )
        return frame

    def contents(self, messages: Sequence[Message]) -> list[bytes]:
        """Frames one after the other, in as few pieces as the limits of a piece allow; raises as `encode`."""
        parts: Parts = []
        for message in messages:
            self._encode(message, parts)
        content = b"".join(parts)
        if len(content) > self.largest or len(messages) > MOST_FRAMES:
            return [self.encode(message) for message in messages]
        return [content] if content else []

    def frames(self, content: bytes) -> list[Frame]:
        """Takes a content apart into frames, which are yet to be checked.

        Raises:
            InvalidMessage: there are more of them than any content has.
        """
        found: list[Frame] = []
        begin, length = 0, len(content)
        while begin < length:
            size = length - begin  # unless the frame can say how long it is
            if size >= HEADER_BYTES and (kind := content[begin + _KIND_AT]) < len(_KINDS):
                size = self._expected_size(kind, *_SIZES.unpack_from(content, begin + _SIZES_AT))
            if size == length:
                return [content]
            found.append(memoryview(content)[begin : begin + size])
            begin += size
            if len(found) > MOST_FRAMES:
                raise InvalidMessage("VFL-6074", f"at most {MOST_FRAMES} frames travel together. Found more.")
        return found

    def _encode(self, message: Message, parts: Parts) -> None:
        layout = _LAYOUTS[type(message)]
        numbers = [-1 if (own := getattr(message, name)) is None else own for name in layout.numbers]
        rows = getattr(message, layout.rows) if layout.rows else None
        matrix = getattr(message, layout.matrix) if layout.matrix else None
        words = getattr(message, layout.words) if layout.words else None
        grid = matrix if words is None else words
        counters, text = _counters_and_text(message, layout)
        first = matrix if rows is None else rows
        lines = 0 if first is None else first.shape[0]
        header = _HEADER.pack(
            _BEGINNING,
            _NUMBERS[type(message)],
            self._number,
            bool(layout.flag and getattr(message, layout.flag)),
            *numbers,
            *(0,) * (3 - len(numbers)),
            lines,
            0 if grid is None else grid.shape[1],
            len(counters),
            len(text),
        )
        parts.append(header)
        if rows is not None:
            parts.append(rows.astype(_ROW).data)
        if matrix is not None:
            parts += self._pack(matrix)
        if words is not None:
            parts.append(words.astype("<u8").data)
        if counters:
            parts.append(struct.pack(f"<{len(counters)}Q", *counters))
        if text:
            parts.append(text)

    def from_client(self, frame: Frame, client: int) -> ClientMessage:
        """Reads a frame that `client` sent.

        Raises:
            InvalidMessage: it is no frame of a kind clients send, or its lengths do not add up.
        """
        message: ClientMessage = self._decode(frame, client, _FROM_CLIENT)
        return message

    def from_server(self, frame: Frame, client: int) -> ServerMessage:
        """Reads a frame that the server sent to `client`; raises as `from_client` does."""
        message: ServerMessage = self._decode(frame, client, _FROM_SERVER)
        return message

    def as_received_by_server(self, message: ClientMessage) -> ClientMessage:
        """The message as it would come out at the other end; float32 loses nothing."""
        if self.encoding == "float32":
            return message
        return self.from_client(self.encode(message), message.client)

    def as_received_by_client(self, message: ServerMessage) -> ServerMessage:
        """As `as_received_by_server`, the other way."""
        if self.encoding == "float32":
            return message
        return self.from_server(self.encode(message), message.client)

    def _decode(self, frame: Frame, client: int, allowed: frozenset[type[Message]]) -> Any:
        header = self._read_header(frame, allowed)
        _, number, _, flag, first, second, third, lines, width, counters, text = header
        kind = _KINDS[number]
        layout = _LAYOUTS[kind]
        fields: dict[str, Any] = dict(zip(layout.numbers, (first, second, third), strict=False))
        fields["client"] = client
        if layout.flag:
            fields[layout.flag] = bool(flag)
        if kind is Refresh and fields["request"] < 0:
            fields["request"] = None
        position = HEADER_BYTES
        if layout.rows:
            rows = np.frombuffer(frame, _ROW, lines, position)
            fields[layout.rows] = rows.astype(_NUMBER)
            position += ROW_BYTES * lines
        if layout.matrix:
            fields[layout.matrix] = self._unpack(frame, position, lines, width)
        if layout.words:
            words = np.frombuffer(frame, "<u8", lines * width, position)
            fields[layout.words] = words.astype(np.uint64).reshape(lines, width)
        end = len(frame) - text if layout.ends_freely else len(frame)
        counted = struct.unpack_from(f"<{counters}Q", frame, end - 8 * counters) if layout.counts else ()
        if layout.counters:
            fields[layout.counters] = counted
        if not layout.ends_freely:
            return kind(**fields)
        content = frame[end:]
        if layout.text:
            fields[layout.text] = bytes(content).decode(errors="replace")
        if layout.content:
            fields[layout.content] = bytes(content)
        if layout.contents:
            fields[layout.contents] = _cut(bytes(content), counted)
        return kind(**fields)

    def _read_header(self, frame: Frame, allowed: frozenset[type[Message]]) -> tuple[Any, ...]:
        """The header, as `_HEADER` has it, once it is known to describe exactly this frame."""
        if not HEADER_BYTES <= len(frame) <= self.largest:
            raise InvalidMessage(
                "VFL-6075",
                f"a frame has {HEADER_BYTES} to {self.largest:,} bytes. Found {len(frame):,}. "
                "network.largest_message sets the limit.",
            )
        header = _HEADER.unpack_from(frame)
        beginning, number, encoding, flag = header[:4]
        if beginning != _BEGINNING:
            raise InvalidMessage(
                "VFL-6076", f"a frame begins with {_BEGINNING!r}, version last. Found {beginning!r}."
            )
        if number >= len(_KINDS) or _KINDS[number] not in allowed or flag > 1:
            raise InvalidMessage("VFL-6077", f"a message of kind {number}, flag {flag} is not expected here.")
        if encoding != self._number:
            raise InvalidMessage(
                "VFL-6078", f"matrices travel as {self.encoding} in this run. Found encoding {encoding}."
            )
        expected = self._expected_size(number, *header[-4:])
        if expected != len(frame):
            raise InvalidMessage("VFL-6079", f"the header promises {expected:,} bytes. Found {len(frame):,}.")
        return header

    def _expected_size(self, kind: int, lines: int, width: int, counters: int, text: int) -> int:
        line, value, counter, letter = self._bytes[kind]
        return HEADER_BYTES + lines * (line + value * width) + counter * counters + letter * text


def _counters_and_text(message: Message, layout: _Layout) -> tuple[Sequence[int], bytes]:
    """The two parts at a frame's end."""
    if not (layout.counts or layout.ends_freely):
        return (), b""
    if layout.contents:
        contents = getattr(message, layout.contents)
        return [len(content) for content in contents], b"".join(contents)
    counters = getattr(message, layout.counters) if layout.counters else ()
    if layout.content:
        return counters, getattr(message, layout.content)
    return counters, getattr(message, layout.text).encode()[:LONGEST_TEXT] if layout.text else b""


def _cut(content: bytes, lengths: Sequence[int]) -> tuple[bytes, ...]:
    if sum(lengths) != len(content):
        raise InvalidMessage(
            "VFL-6080", f"parts of {sum(lengths):,} bytes are promised. Found {len(content):,}."
        )
    ends = list(accumulate(lengths))
    return tuple(content[end - length : end] for end, length in zip(ends, lengths, strict=True))
