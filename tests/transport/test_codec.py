"""Every message survives encoding and decoding, and no bytes whatsoever do harm."""

import hashlib
from contextlib import suppress
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vafl.errors import ConfigError, InvalidMessage
from vafl.protocol.messages import (
    LARGEST_OFFER,
    MARK_BYTES,
    Decline,
    Durable,
    Evaluate,
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
    Skipped,
    Stop,
    Upload,
    Welcome,
)
from vafl.transport.codec import _BEGINNING, _HEADER, _KINDS, _LAYOUTS, HEADER_BYTES, Codec
from vafl.transport.grpc.wire import PROTOCOL
from vafl.transport.settings import ENCODINGS

counts = st.integers(0, 2**40)
short = st.text(max_size=40)
names = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20).filter(
    lambda name: name != "*"
)
groups = st.lists(names, max_size=4, unique=True).map(lambda own: tuple(name.encode() for name in own))
marks = st.binary(min_size=MARK_BYTES, max_size=MARK_BYTES)


@st.composite
def matrices(draw, lines=None):
    lines = draw(st.integers(1, 6)) if lines is None else lines
    width = draw(st.integers(1, 5))
    values = st.floats(-1000, 1000, width=32)
    flat = draw(st.lists(values, min_size=lines * width, max_size=lines * width))
    return np.array(flat, dtype=np.float32).reshape(lines, width)


@st.composite
def row_sets(draw):
    rows = draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=6, unique=True))
    return np.array(rows, dtype=np.int64)


@st.composite
def masked(draw, lines):
    width = draw(st.integers(1, 4))
    words = draw(st.lists(st.integers(0, 2**64 - 1), min_size=lines * width, max_size=lines * width))
    return np.array(words, dtype=np.uint64).reshape(lines, width)


offers = st.binary(min_size=1, max_size=LARGEST_OFFER)


@st.composite
def client_messages(draw):
    rows = draw(row_sets())
    matrix = draw(matrices(len(rows)))
    activation, behind, sequence = draw(st.integers(5, 2**40)), draw(st.integers(0, 5)), draw(counts)
    return draw(
        st.sampled_from(
            [
                Join(2, activation, activation - behind, draw(st.integers(-1, 2**40)), draw(groups)),
                Upload(2, sequence, activation, rows, matrix, draw(st.booleans()), behind),
                Refresh(2, sequence, rows, matrix, draw(st.none() | counts), behind),
                Query(2, sequence, activation),
                Decline(2, sequence, activation, draw(short)),
                Offer(2, sequence, draw(counts), draw(offers)),
                MaskedUpload(2, sequence, draw(counts), activation, rows, draw(masked(len(rows)))),
                MaskedRefresh(2, sequence, draw(counts), activation, rows, draw(masked(len(rows)))),
                LedgerMark(2, sequence, draw(marks)),
            ]
        )
    )


@st.composite
def server_messages(draw):
    activations = tuple(draw(st.lists(counts, max_size=5)))
    return draw(
        st.sampled_from(
            [
                Welcome(2, draw(counts), activations, draw(counts), draw(counts), draw(marks | st.just(b""))),
                Gradient(2, draw(counts), draw(counts), draw(matrices()), activations),
                Gradient(
                    2, 0, 1, draw(matrices()), (*activations, 3), draw(counts), (7,) * (len(activations) + 1)
                ),
                Skipped(2, draw(counts), draw(counts), activations, draw(short)),
                Evaluate(2, draw(counts), draw(row_sets()), draw(counts) - 1, draw(st.booleans())),
                Request(2, draw(counts), draw(row_sets()), permute=draw(names | st.just("*"))),
                Durable(2, draw(counts)),
                Rekey(2, draw(counts), draw(short)),
                Keys(2, draw(counts), tuple(draw(st.lists(offers, max_size=4)))),
                Refused(2, draw(short)),
                Stop(2, draw(short), draw(st.booleans())),
            ]
        )
    )


def fields(message):
    return {name: getattr(message, name) for name in message.__slots__}


def assert_same(one, other):
    assert type(one) is type(other)
    for name, value in fields(one).items():
        if isinstance(value, np.ndarray):
            assert value.dtype == getattr(other, name).dtype
            assert np.array_equal(value, getattr(other, name)), name
        else:
            assert value == getattr(other, name), name


@given(client_messages())
def test_what_a_client_says_arrives(message):
    codec = Codec()
    frame = codec.encode(message)
    assert len(frame) == codec.size(message)
    assert_same(codec.from_client(frame, 2), message)


@given(server_messages())
def test_what_the_server_says_arrives(message):
    codec = Codec()
    frame = codec.encode(message)
    assert len(frame) == codec.size(message)
    assert_same(codec.from_server(frame, 2), message)


@given(matrices(), st.sampled_from(ENCODINGS))
def test_other_encodings_lose_no_more_than_their_digits(matrix, encoding):
    codec = Codec(encoding)
    message = Upload(0, 1, 0, np.arange(len(matrix)), matrix)
    frame = codec.encode(message)
    assert len(frame) == codec.size(message)
    found = codec.from_client(frame, 0).embeddings
    relative = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8, "int8": 0.0}[encoding]
    per_row = {"int8": 0.5 / 127}.get(encoding, 0.0) * np.abs(matrix).max(axis=1, keepdims=True)
    allowed = relative * np.abs(matrix) + per_row * 1.001 + 1e-7
    assert (np.abs(found - matrix) <= allowed).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_matrix_travels_row_by_row_however_it_lies_in_memory(encoding):
    codec, matrix = Codec(encoding), np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    lying = [Upload(0, 1, 0, np.arange(3), one) for one in (matrix, np.asfortranarray(matrix))]
    assert codec.encode(lying[0]) == codec.encode(lying[1])


@given(st.lists(server_messages(), max_size=5))
def test_what_is_said_together_arrives_in_order(messages):
    codec = Codec()
    contents = codec.contents(messages)
    assert len(contents) == bool(messages)
    frames = [frame for content in contents for frame in codec.frames(content)]
    assert len(frames) == len(messages)
    for frame, message in zip(frames, messages, strict=True):
        assert_same(codec.from_server(frame, 2), message)


def test_what_is_said_together_keeps_the_limits_of_a_message():
    stops = [Stop(0, "x" * 100)] * 3
    assert [len(content) for content in Codec(largest=300).contents(stops)] == [148] * 3
    assert [len(content) for content in Codec(largest=444).contents(stops)] == [444]
    assert len(Codec().contents(stops * 43)) == 129


@given(st.lists(server_messages(), min_size=1, max_size=3), st.data())
def test_a_content_cut_short_or_changed_gives_frames_that_hold_all_of_it(messages, data):
    content = bytearray(Codec().contents(messages)[0])
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = bytes(content[: data.draw(st.integers(0, len(content)))])
    assert b"".join(Codec().frames(content)) == content


def test_more_frames_than_ever_travel_together_are_refused():
    with pytest.raises(InvalidMessage, match=r"VFL-6074.*128"):
        Codec().frames(Codec().encode(Stop(0, "")) * 129)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_as_many_rows_as_fit_fit_and_one_more_is_said_to_be_too_many(encoding):
    codec = Codec(encoding, 1000)
    most = codec.most_rows(5)
    codec.encode(Refresh(0, 1, np.arange(most), np.ones((most, 5), np.float32)))
    large = Refresh(0, 1, np.arange(most + 1), np.ones((most + 1, 5), np.float32))
    for said in (codec.encode, lambda message: codec.contents([message])):
        with pytest.raises(ConfigError, match=r"VFL-6073.*1,000"):
            said(large)
    with pytest.raises(ConfigError, match="VFL-6072"):
        codec.most_rows(1000)


def test_as_many_masked_rows_as_fit_fit():
    most = Codec(largest=1000).most_rows(3, masked=True)
    words = np.ones((most, 3), dtype=np.uint64)
    assert 1000 - 28 < len(Codec().encode(MaskedRefresh(0, 1, 0, 0, np.arange(most), words))) <= 1000


ROWS, MATRIX = np.array([3, 1]), np.ones((2, 5), np.float32)
WORDS = np.zeros((2, 5), dtype=np.uint64)


def test_bytes_are_header_rows_and_numbers():
    assert Codec().size(Upload(0, 0, 0, ROWS, MATRIX)) == HEADER_BYTES + 2 * 4 + 2 * 5 * 4
    assert Codec().size(Refresh(0, 0, ROWS, MATRIX)) == HEADER_BYTES + 2 * 4 + 2 * 5 * 4
    assert Codec().size(Gradient(0, 0, 0, MATRIX, (1, 2, 3))) == HEADER_BYTES + 2 * 5 * 4 + 3 * 8
    assert Codec().size(Skipped(0, 0, 0, (1, 2, 3), "late")) == HEADER_BYTES + 3 * 8 + 4
    assert Codec().size(Welcome(0, 0, (1, 2))) == HEADER_BYTES + 2 * 8
    assert Codec().size(Welcome(0, 0, (1, 2), mark=bytes(16))) == HEADER_BYTES + 2 * 8 + 16
    assert Codec().size(LedgerMark(0, 0, bytes(16))) == HEADER_BYTES + 16
    assert Codec().size(Request(0, 0, ROWS)) == HEADER_BYTES + 2 * 4
    assert Codec().size(MaskedUpload(0, 1, 2, 3, ROWS, WORDS)) == HEADER_BYTES + 2 * 4 + 2 * 5 * 8
    assert Codec().size(Evaluate(0, 0, ROWS, 3, restore=True)) == HEADER_BYTES + 2 * 4
    for message in (Join(0), Query(0, 0, 0), Durable(0, 3)):
        assert Codec().size(message) == HEADER_BYTES


@pytest.mark.parametrize(("text", "length"), [("", 0), ("no budget", 9), ("épuisé", 8)])
def test_text_counts_as_utf8(text, length):
    for message in (Decline(0, 0, 0, text), Stop(0, text), Refused(0, text), Skipped(0, 0, 0, (), text)):
        assert Codec().size(message) == HEADER_BYTES + length


def test_another_layout_is_another_protocol():
    """Parties of different versions refuse each other by PROTOCOL; without that they would misread frames."""
    layouts = [(kind.__name__, astuple(layout)) for kind, layout in _LAYOUTS.items()]
    content = repr((_BEGINNING, _HEADER.format, layouts)).encode()
    assert (PROTOCOL, hashlib.sha256(content).hexdigest()[:16]) == (7, "7b9f35a8596a1d14")


def test_a_header_is_48_bytes():
    assert HEADER_BYTES == 48


def test_short_encodings_are_shorter():
    message = Upload(0, 1, 0, np.arange(600), np.ones((600, 10), np.float32))
    sizes = [Codec(encoding).size(message) - HEADER_BYTES - 4 * 600 for encoding in ENCODINGS]
    assert sizes == [24_000, 12_000, 12_000, 600 * 14]


@given(st.binary(max_size=300))
def test_junk_is_refused(junk):
    for read in (Codec().from_client, Codec().from_server):
        with pytest.raises(InvalidMessage):
            read(junk, 0)


@given(client_messages(), st.data())
def test_a_damaged_frame_is_refused_or_is_a_valid_message(message, data):
    """A flipped bit may make another valid message, but never a crash or a message of another party."""
    frame = bytearray(Codec().encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    frame = frame[: data.draw(st.integers(0, len(frame)))] if data.draw(st.booleans()) else frame
    try:
        read = Codec().from_client(bytes(frame), 3)
    except InvalidMessage:
        return
    assert read.client == 3


@given(
    st.sampled_from(ENCODINGS),
    st.integers(0, len(_KINDS) - 1),
    st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3),
    st.tuples(*[st.integers(0, 3)] * 4),
    st.integers(0, 255),
)
@example("float32", 2, (0, 0, 0), (0, 0, 0, 0), 0)  # a refresh of nothing
def test_whatever_a_header_promises_it_is_read_or_refused(encoding, kind, numbers, sizes, filler):
    header = _HEADER.pack(_BEGINNING, kind, ENCODINGS.index(encoding), 0, *numbers, *sizes)
    codec = Codec(encoding)
    rest = codec._expected_size(kind, *sizes) - len(header)
    for read in (codec.from_client, codec.from_server):
        with suppress(InvalidMessage):
            read(header + bytes([filler]) * rest, 0)


def test_lengths_are_checked_before_anything_is_allocated():
    frame = bytearray(Codec().encode(Upload(0, 1, 0, np.arange(2), np.ones((2, 2), np.float32))))
    frame[32:40] = np.array([2**32 - 1, 2**32 - 1], dtype="<u4").tobytes()
    with pytest.raises(InvalidMessage, match="VFL-6079"):
        Codec().from_client(bytes(frame), 0)
    with pytest.raises(InvalidMessage, match="VFL-6075"):
        Codec(largest=60).from_client(bytes(frame), 0)


def test_kinds_and_encodings_must_be_the_expected_ones():
    with pytest.raises(InvalidMessage, match="VFL-6077"):
        Codec().from_client(Codec().encode(Stop(0, "now")), 0)
    with pytest.raises(InvalidMessage, match=r"VFL-6078.*float32.*3"):
        Codec().from_client(Codec("int8").encode(Join(0)), 0)
    with pytest.raises(InvalidMessage, match="VFL-6076"):
        Codec().from_client(b"VG" + Codec().encode(Join(0))[2:], 0)
    with pytest.raises(ConfigError, match="VFL-6071"):
        Codec("float8")


def test_not_finite_numbers_are_refused():
    frame = Codec().encode(Upload(0, 1, 0, np.arange(1), np.zeros((1, 1), np.float32)))
    bad = frame[:-4] + np.array([np.nan], dtype="<f4").tobytes()
    with pytest.raises(InvalidMessage, match="VFL-4024"):
        Codec().from_client(bad, 0)


def test_masked_words_are_no_matrix_of_the_runs_encoding():
    """Masked words keep all their bits, whatever the encoding of gradients."""
    words = np.array([[2**64 - 1, 2**63 + 1]], dtype=np.uint64)
    for encoding in ENCODINGS:
        codec, message = Codec(encoding), MaskedUpload(0, 1, 2, 3, np.arange(1), words)
        assert len(codec.encode(message)) == codec.size(message)
        assert_same(codec.from_client(codec.encode(message), 0), message)


def test_the_lengths_of_keys_must_add_up():
    frame = bytearray(Codec().encode(Keys(0, 1, (b"one", b"four", b"sixsix"))))
    frame[HEADER_BYTES : HEADER_BYTES + 8] = np.array([4], dtype="<u8").tobytes()
    with pytest.raises(InvalidMessage, match=r"VFL-6080.*14.*13"):
        Codec().from_server(bytes(frame), 0)


def test_offers_and_words_are_checked_when_read():
    empty = bytearray(Codec().encode(Offer(0, 1, 0, b"x")))[:-1]
    empty[44:48] = bytes(4)
    with pytest.raises(InvalidMessage, match=r"VFL-4026.*4096.*0"):
        Codec().from_client(bytes(empty), 0)
    frame = bytearray(Codec().encode(MaskedUpload(0, 1, 0, 0, np.arange(2), np.zeros((2, 2), np.uint64))))
    frame[36:40] = np.array([2**32 - 1], dtype="<u4").tobytes()
    with pytest.raises(InvalidMessage, match="VFL-6079"):
        Codec().from_client(bytes(frame), 0)


@pytest.mark.parametrize("size", [1, 15, 17, 1000])
def test_a_mark_of_another_length_is_refused(size):
    """The frame is well-formed; only its mark is not."""
    codec = Codec()
    for message, read in (
        (LedgerMark(2, 1, bytes(16)), codec.from_client),
        (Welcome(2, 0, (1, 2), mark=bytes(16)), codec.from_server),
    ):
        frame = bytearray(codec.encode(message)[:-16] + bytes(size))
        frame[HEADER_BYTES - 4 : HEADER_BYTES] = size.to_bytes(4, "little")
        with pytest.raises(InvalidMessage, match=f"16 bytes. Found {size}"):
            read(bytes(frame), 2)
    with pytest.raises(InvalidMessage, match=r"VFL-4027.*0"):
        LedgerMark(2, 1, b"")
