"""Encode messages as frames of bytes, and check and decode frames.

A content is what a stream sends at once: one or more frames in a row. A frame is a header of 48 bytes,
followed by those of these parts that its kind of message has, in this order:

    header │ rows (uint32) │ matrix (run's encoding) or words (uint64) │ counters (uint64) │ text or bytes

The header has the number of rows, the width of the matrix, the number of counters and the length of the text.
A frame is decoded only if these add up to its actual length, so a hostile header cannot cause a large
allocation. Nothing is ever unpickled. A frame does not name its sender: the receiver knows the sender from
the connection.
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
from vafl.transport.encodings import PACKING, Frame, Parts, matrix_bytes
from vafl.transport.settings import ENCODINGS, Encoding

Message = ClientMessage | ServerMessage
LONGEST_TEXT = 1024  # bytes; longer text is cut when it is encoded
MOST_FRAMES = 128  # frames in one content

_BEGINNING = b"VF\2"  # the last byte is the version
# beginning, kind, encoding, flag, 2 unused bytes; three numbers; rows, width, counters, bytes of text
_HEADER = struct.Struct("<3sBBBxxqqqIIII")
HEADER_BYTES = _HEADER.size
_SIZES, _SIZES_AT, _KIND_AT = struct.Struct("<IIII"), 32, 3
_ROW, _NUMBER = np.dtype("<u4"), np.dtype("<i8")
ROW_BYTES = _ROW.itemsize


@dataclass(frozen=True)
class _Layout:
    """Which field of a message is encoded in which part of its frame. Empty means that there is none.

    Attributes:
        numbers: up to three integers, in the header.
        flag: a bool, in the header.
        rows: row numbers.
        matrix: a float matrix, in the run's encoding.
        words: a matrix of 64-bit words.
        counters: a sequence of integers.
        more_counters: a second one of the same length, or none; the header's flag tells which.
        text: a string at the end.
        content: bytes at the end.
        contents: several byte strings at the end; their lengths are the counters.
    """

    numbers: tuple[str, ...] = ()
    flag: str = ""
    rows: str = ""
    matrix: str = ""
    words: str = ""
    counters: str = ""
    more_counters: str = ""
    text: str = ""
    content: str = ""
    contents: str = ""

    @cached_property
    def counts(self) -> bool:
        """Return whether the frame has counters."""
        return bool(self.counters or self.contents)

    @cached_property
    def ends_freely(self) -> bool:
        """Return whether the frame ends with text or bytes."""
        return bool(self.text or self.content or self.contents)

    def bytes_of(self, encoding: Encoding) -> tuple[int, int, int, int]:
        """Return the bytes per row, value, counter and text byte; 0 if the message lacks it."""
        row, value = ROW_BYTES * bool(self.rows), 8 * bool(self.words)
        if self.matrix:
            scale = matrix_bytes(encoding, 1, 0)  # int8 has a scale per row, even if the row has no values
            row, value = row + scale, matrix_bytes(encoding, 1, 1) - scale
        return row, value, 8 * self.counts, int(self.ends_freely)


# The position of a kind in this table is its number in the header. A change of the table is a change of the
# protocol: raise PROTOCOL (grpc/wire.py).
_LAYOUTS: dict[type[Message], _Layout] = {
    Join: _Layout(("activation", "applied", "iteration"), contents="groups"),
    Upload: _Layout(("sequence", "activation", "in_flight"), flag="answer", rows="rows", matrix="embeddings"),
    Refresh: _Layout(("sequence", "request", "in_flight"), rows="rows", matrix="embeddings"),
    Query: _Layout(("sequence", "activation")),
    Decline: _Layout(("sequence", "request"), text="reason"),
    Finished: _Layout(("sequence",), text="reason"),
    Welcome: _Layout(("iteration", "durable", "run"), counters="activations", content="mark"),
    Gradient: _Layout(
        ("activation", "iteration", "refreshed"),
        matrix="gradients",
        counters="activations",
        more_counters="stored",
    ),
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
    """Encode and decode frames.

    Args:
        encoding: of matrices; `int8` has one float32 scale per row.
        largest: the largest number of bytes of a frame, and of a content.
    """

    def __init__(self, encoding: Encoding = "float32", largest: int = 64 << 20) -> None:
        if encoding not in ENCODINGS:
            raise ConfigError(
                "VFL-6071", f"network.encoding must be one of {', '.join(ENCODINGS)}. Found {encoding!r}."
            )
        self.encoding, self.largest = encoding, largest
        self._number = ENCODINGS.index(encoding)
        self._pack, self._unpack = PACKING[encoding]
        self._bytes = [layout.bytes_of(encoding) for layout in _LAYOUTS.values()]

    def size(self, message: Message) -> int:
        """Return the number of bytes of a message's frame, without encoding it."""
        kind = type(message)
        layout = _LAYOUTS[kind]
        counters, text = _counters_and_text(message, layout)
        return self._expected_size(_NUMBERS[kind], *_shape(message, layout), len(counters), len(text))

    def most_rows(self, width: int, *, masked: bool = False) -> int:
        """Return how many rows of embeddings, or of masked words, fit into one frame.

        Raises:
            ConfigError: not even one row fits.
        """
        size = ROW_BYTES + (8 * width if masked else matrix_bytes(self.encoding, 1, width))
        if HEADER_BYTES + size > self.largest:
            raise ConfigError(
                "VFL-6072",
                f"network.largest_message must have room for one row's embedding, {HEADER_BYTES + size:,} "
                f"bytes. Found {self.largest:,}. Raise it at every party.",
            )
        return (self.largest - HEADER_BYTES) // size

    def encode(self, message: Message) -> bytes:
        """Return a message's frame.

        Raises:
            ConfigError: the frame is too large. The receiver would refuse it after every reconnect.
        """
        parts: Parts = []
        self._encode(message, parts)
        frame = b"".join(parts)
        if len(frame) > self.largest:
            raise ConfigError(
                "VFL-6073",
                f"every message must fit into network.largest_message, {self.largest:,} bytes. Found "
                f"{type(message).__name__} with {len(frame):,} bytes. Raise the limit at every party, or "
                "make messages smaller with schedule.batch_size (prediction.chunk for predictions).",
            )
        return frame

    def contents(self, messages: Sequence[Message]) -> list[bytes]:
        """Return messages as one content, or as one content each if together they exceed a limit.

        Raises:
            ConfigError: a frame is too large, see `encode`.
        """
        parts: Parts = []
        for message in messages:
            self._encode(message, parts)
        content = b"".join(parts)
        if len(content) > self.largest or len(messages) > MOST_FRAMES:
            return [self.encode(message) for message in messages]
        return [content] if content else []

    def frames(self, content: bytes) -> list[Frame]:
        """Split a content into frames. Their contents are checked later, by `from_client` or `from_server`.

        An empty content is one empty frame, which fails its checks.

        Raises:
            InvalidMessage: the content has more than `MOST_FRAMES` frames.
        """
        frames: list[Frame] = []
        begin, length = 0, len(content)
        while begin < length or not frames:
            # Without a complete header and a known kind there is no length to go by: take all that is left as
            # one frame, which fails its checks later.
            size = length - begin
            if size >= HEADER_BYTES and (kind := content[begin + _KIND_AT]) < len(_KINDS):
                size = self._expected_size(kind, *_SIZES.unpack_from(content, begin + _SIZES_AT))
            if size == length:
                return [content]
            frames.append(memoryview(content)[begin : begin + size])
            begin += size
            if len(frames) > MOST_FRAMES:
                raise InvalidMessage(
                    "VFL-6074", f"a message may hold at most {MOST_FRAMES} frames. Found more."
                )
        return frames

    def _encode(self, message: Message, parts: Parts) -> None:
        layout = _LAYOUTS[type(message)]
        # Only `request` of a Refresh can be None. It is encoded as -1, which is no number of a request.
        numbers = [-1 if (value := getattr(message, name)) is None else value for name in layout.numbers]
        rows = getattr(message, layout.rows) if layout.rows else None
        matrix = getattr(message, layout.matrix) if layout.matrix else None
        words = getattr(message, layout.words) if layout.words else None
        counters, text = _counters_and_text(message, layout)
        header = _HEADER.pack(
            _BEGINNING,
            _NUMBERS[type(message)],
            self._number,
            bool((name := layout.flag or layout.more_counters) and getattr(message, name)),
            *numbers,
            *(0,) * (3 - len(numbers)),
            *_shape(message, layout),
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
        """Decode a frame that `client` has sent.

        Raises:
            InvalidMessage: the frame is malformed, or clients do not send messages of its kind.
        """
        message: ClientMessage = self._decode(frame, client, _FROM_CLIENT)
        return message

    def from_server(self, frame: Frame, client: int) -> ServerMessage:
        """Decode a frame that the server has sent to `client`.

        Raises:
            InvalidMessage: the frame is malformed, or servers do not send messages of its kind.
        """
        message: ServerMessage = self._decode(frame, client, _FROM_SERVER)
        return message

    def as_received_by_server(self, message: ClientMessage) -> ClientMessage:
        """Return the message as the server would decode it. The simulator uses this; float32 is exact."""
        if self.encoding == "float32":
            return message
        return self.from_client(self.encode(message), message.client)

    def as_received_by_client(self, message: ServerMessage) -> ServerMessage:
        """Return the message as the client would decode it. The simulator uses this; float32 is exact."""
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
        if layout.more_counters and flag:
            counted, fields[layout.more_counters] = _halves(counted)
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
        """Return the fields of `_HEADER`, after checking that they describe exactly this frame."""
        if not HEADER_BYTES <= len(frame) <= self.largest:
            raise InvalidMessage(
                "VFL-6075",
                f"a frame must have {HEADER_BYTES} to {self.largest:,} bytes. Found {len(frame):,}. Set the "
                "same network.largest_message at every party.",
            )
        header = _HEADER.unpack_from(frame)
        beginning, number, encoding, flag = header[:4]
        if beginning != _BEGINNING:
            raise InvalidMessage(
                "VFL-6076",
                f"a frame must begin with {_BEGINNING!r}, the version last. Found {beginning!r}. Use the "
                "same version of vafl at every party.",
            )
        if number >= len(_KINDS) or _KINDS[number] not in allowed or flag > 1:
            raise InvalidMessage(
                "VFL-6077",
                "a message must be of a kind that its sender may send, with flag 0 or 1. Found kind "
                f"{number}, flag {flag}.",
            )
        if encoding != self._number:
            raise InvalidMessage(
                "VFL-6078",
                f"matrices must have the encoding {self.encoding} in this run. Found encoding number "
                f"{encoding}. Set the same network.encoding at every party.",
            )
        expected = self._expected_size(number, *header[-4:])
        if expected != len(frame):
            raise InvalidMessage(
                "VFL-6079",
                f"a frame must have the length that follows from its header, {expected:,} bytes. Found "
                f"{len(frame):,}.",
            )
        return header

    def _expected_size(self, kind: int, lines: int, width: int, counters: int, text: int) -> int:
        # Python integers do not overflow, so no header can describe a size that wraps around.
        per_row, per_value, per_counter, per_byte = self._bytes[kind]
        return HEADER_BYTES + lines * (per_row + per_value * width) + per_counter * counters + per_byte * text


def _shape(message: Message, layout: _Layout) -> tuple[int, int]:
    """Return the number of rows, and the width of the matrix or words; 0 for what a message lacks."""
    name = layout.matrix or layout.words
    if name:
        lines, width = getattr(message, name).shape
        return lines, width
    return len(getattr(message, layout.rows)) if layout.rows else 0, 0


def _counters_and_text(message: Message, layout: _Layout) -> tuple[Sequence[int], bytes]:
    """Return the last two parts of a message's frame."""
    if not (layout.counts or layout.ends_freely):
        return (), b""
    if layout.contents:
        contents = getattr(message, layout.contents)
        return [len(content) for content in contents], b"".join(contents)
    counters = getattr(message, layout.counters) if layout.counters else ()
    if layout.more_counters:
        counters += getattr(message, layout.more_counters)
    if layout.content:
        return counters, getattr(message, layout.content)
    return counters, getattr(message, layout.text).encode()[:LONGEST_TEXT] if layout.text else b""


def _halves(counters: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cut counters into two sequences of one length."""
    half = len(counters) // 2
    if 2 * half != len(counters):
        raise InvalidMessage(
            "VFL-6081",
            f"two sequences of counters must have the same length. Found {len(counters)} counters in all.",
        )
    return counters[:half], counters[half:]


def _cut(content: bytes, lengths: Sequence[int]) -> tuple[bytes, ...]:
    """Cut bytes into parts of these lengths, which must add up."""
    if sum(lengths) != len(content):
        raise InvalidMessage(
            "VFL-6080",
            f"the parts of a message must add up to its content. Found parts of {sum(lengths):,} bytes in "
            f"{len(content):,}.",
        )
    ends = list(accumulate(lengths))
    return tuple(content[end - length : end] for end, length in zip(ends, lengths, strict=True))
