import dataclasses

import numpy as np
import pytest

from vafl.errors import Diverged, InvalidMessage
from vafl.protocol.messages import (
    Gradient,
    Join,
    Keys,
    MaskedRefresh,
    MaskedUpload,
    Offer,
    Query,
    Refresh,
    Rekey,
    Upload,
    made_here,
)

ROWS, MATRIX = np.array([3, 1]), np.ones((2, 5), np.float32)


WORDS = np.zeros((2, 5), dtype=np.uint64)
MASKED_FAULTS = {
    "another type": ({"words": WORDS.astype(np.int64)}, r"VFL-4025.*2.*int64.*\[2, 5\]"),
    "a vector": ({"words": WORDS[0]}, r"VFL-4025.*uint64.*\[5\]"),
    "too few lines": ({"words": WORDS[:1]}, r"VFL-4025.*2.*uint64.*\[1, 5\]"),
    "a negative epoch": ({"epoch": -1}, r"VFL-4028.*epoch.*\-1"),
    "rows of another type": ({"rows": ROWS.astype(np.int32)}, "VFL-4021"),
}


@pytest.mark.parametrize(("changes", "said"), MASKED_FAULTS.values(), ids=MASKED_FAULTS.keys())
@pytest.mark.parametrize("kind", [MaskedUpload, MaskedRefresh])
def test_a_masked_message_checks_itself(kind, changes, said):
    good = kind(0, 1, 2, 3, ROWS, WORDS)
    with pytest.raises(InvalidMessage, match=said):
        dataclasses.replace(good, **changes)


@pytest.mark.parametrize("offer", [b"", bytes(4097)])
def test_offers_have_a_size(offer):
    with pytest.raises(InvalidMessage, match=r"VFL-4026.*4096"):
        Offer(0, 1, 2, offer)
    with pytest.raises(InvalidMessage, match=r"VFL-4026.*4096"):
        Keys(0, 1, (b"good", offer))
    with pytest.raises(InvalidMessage, match=r"VFL-4028.*epoch"):
        Rekey(0, -1, "why")


NO_ROWS = np.empty(0, np.int64)
FAULTS = {
    "rows of another type": (
        {"rows": ROWS.astype(np.int32)},
        r"VFL-4021.*int32.*\[2\]",
    ),
    "rows in a matrix": ({"rows": ROWS[None]}, r"VFL-4021.*int64.*\[1, 2\]"),
    "embeddings of another type": ({"embeddings": MATRIX.astype(float)}, r"VFL-4022.*float64"),
    "embeddings in a vector": ({"embeddings": MATRIX[0]}, r"VFL-4022.*float32.*\[5\]"),
    "too few embeddings": ({"embeddings": MATRIX[:1]}, r"VFL-4023.*2.*1"),
    "NaN": ({"embeddings": MATRIX * np.nan}, "VFL-4024"),
    "infinity": ({"embeddings": MATRIX * -np.inf}, "VFL-4024"),
    "a negative sequence": ({"sequence": -1}, r"VFL-4028.*sequence.*\-1"),
}


@pytest.mark.parametrize(("changes", "said"), FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize(
    "good", [Upload(0, 0, 0, ROWS, MATRIX), Refresh(0, 0, ROWS, MATRIX)], ids=["upload", "refresh"]
)
def test_a_message_checks_itself(good, changes, said):
    with pytest.raises(InvalidMessage, match=said):
        dataclasses.replace(good, **changes)


def test_an_upload_needs_rows_and_a_refresh_does_not():
    with pytest.raises(InvalidMessage, match="VFL-4030"):
        Upload(0, 0, 0, NO_ROWS, MATRIX[:0])
    assert not len(Refresh(0, 0, NO_ROWS, MATRIX[:0]).rows)


def test_counters_are_not_negative():
    with pytest.raises(InvalidMessage, match=r"VFL-4028.*activation.*\-3"):
        Upload(0, 0, -3, ROWS, MATRIX)
    with pytest.raises(InvalidMessage, match=r"VFL-4028.*activation.*\-1"):
        Query(0, 0, -1)
    with pytest.raises(InvalidMessage, match=r"VFL-4028.*sequence.*\-1"):
        Query(0, -1, 0)
    with pytest.raises(InvalidMessage, match=r"VFL-4029.*64.*\-1"):
        Refresh(0, 0, ROWS, MATRIX, in_flight=-1)
    with pytest.raises(InvalidMessage, match=r"VFL-4029.*64.*\-1"):
        Upload(0, 0, 3, ROWS, MATRIX, in_flight=-1)


def test_no_more_uploads_are_in_flight_than_there_were():
    Upload(0, 0, 3, ROWS, MATRIX, in_flight=3)
    with pytest.raises(InvalidMessage, match=r"VFL-4028.*activation.*\-1"):
        Upload(0, 0, 3, ROWS, MATRIX, in_flight=4)


def test_a_join_says_what_can_be():
    for possible in [(0, 0, -1), (4, 4, 7), (4, 2, -1)]:
        Join(0, *possible)
    for impossible, said in {(2, -1, 0): "applied", (2, 3, 0): "activation", (0, 0, -2): "iteration"}.items():
        with pytest.raises(InvalidMessage, match=rf"VFL-4028.*{said}.*-1"):
            Join(0, *impossible)


def test_gradients_are_finite_numbers():
    with pytest.raises(InvalidMessage, match=r"VFL-4024.*gradients"):
        Gradient(0, 0, 0, MATRIX * np.inf, (1,))
    with pytest.raises(InvalidMessage, match=r"VFL-4022.*gradients.*float32"):
        Gradient(0, 0, 0, MATRIX[0], (1,))


def test_messages_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Join(0).client = 1


def test_what_is_not_finite_in_a_message_of_our_own_is_divergence():
    with pytest.raises(Diverged, match="VFL-4035"), made_here():
        Upload(0, 0, 0, ROWS, MATRIX * np.inf)
