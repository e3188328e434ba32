import hashlib

import pytest
from coincurve import PublicKey

from vafl.data.alignment.curve import POINT, TAG, blind_ids, bound, new_salt, new_secret, tag_points
from vafl.errors import InvalidMessage

FIELD = 2**256 - 2**32 - 977
ONE = (1).to_bytes(32, "big")


def hashed(text):
    """Return the point of an id, without blinding."""
    return PublicKey(b"\x04" + blind_ids(ONE, [text]))


X, Y = hashed("a").point()


def split(content, size):
    return [content[place : place + size] for place in range(0, len(content), size)]


def test_both_orders_of_the_secrets_end_in_the_same_tags_and_only_for_the_same_ids():
    one, other = new_secret(), new_secret()
    ids, others = ["a", "007", "ü"], ["7", "a", "ü", "A"]
    salt = new_salt()
    ours = split(tag_points(other, blind_ids(one, ids), salt), TAG)
    theirs = split(tag_points(one, blind_ids(other, others), salt), TAG)
    assert [text for text, tag in zip(ids, ours, strict=True) if tag in theirs] == ["a", "ü"]
    assert len({*ours, *theirs}) == 5


def test_tags_of_other_clients_cannot_be_compared():
    one, other = new_secret(), new_secret()
    salt = new_salt()
    tags = [
        tag_points(other, blind_ids(one, ["a"]), bound(drawn, client))
        for drawn, client in ((salt, "bank"), (salt, "shop"), (new_salt(), "bank"))
    ]
    assert len(set(tags)) == 3
    assert tag_points(one, blind_ids(other, ["a"]), bound(salt, "bank")) == tags[0]


def test_nothing_that_is_sent_is_the_same_twice():
    """Neither ids nor their hashes are sent: new secrets give other bytes for the same ids."""
    ids = ["customer-1", "customer-2"]
    sent = [point for _ in range(3) for point in split(blind_ids(new_secret(), ids), POINT)]
    assert len(set(sent)) == 6
    assert not set(sent) & {blind_ids(ONE, [text]) for text in ids}


def test_a_point_is_its_hash_times_the_secret():
    secret = (3).to_bytes(32, "big")
    own = hashed("a")
    thrice = PublicKey.combine_keys([own, own, own])
    assert blind_ids(secret, ["a"]) == thrice.format(compressed=False)[1:]


def swift(content):
    """Return SwiftEC's map for y^2 = x^3 + 7, from 64 bytes to a point, as in its paper; y has t's parity."""
    u, t = (int.from_bytes(half, "big") % FIELD for half in (content[:32], content[32:]))
    over = (u**3 + 7 - t * t) * pow(2 * t, -1, FIELD)
    other = (over + t) * pow(pow(-3, (FIELD + 1) // 4, FIELD) * u, -1, FIELD)
    slope = over * pow(other, -1, FIELD)
    half = pow(2, -1, FIELD)
    for x in (u + 4 * other * other, (-slope - u) * half, (slope - u) * half):
        y = pow(x**3 + 7, (FIELD + 1) // 4, FIELD)
        if (y * y - x**3 - 7) % FIELD == 0:
            return x % FIELD, y if y % 2 == t % 2 else FIELD - y
    raise AssertionError("one of the three is an x-coordinate")


def test_the_hash_is_swiftecs_map_of_the_ids_digest():
    for text in map(str, range(50)):
        digest = hashlib.blake2b(text.encode(), digest_size=64, person=b"vafl psi hash 2").digest()
        assert hashed(text).point() == swift(digest)


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("007", "02c75326652a7d2509570d3cc29416de77fa732baf7e11987e595c1f728bde4702"),
        ("", "02a2bb637b539032344935455d699d0d67def6fb944e9851d2a63c34e525ab6f1e"),
    ],
)
def test_the_hash_is_the_same_for_every_version(text, point):
    """Parties may have different versions: if the hash changes, frames.PROTOCOL must change too."""
    assert hashed(text).format().hex() == point


@pytest.mark.parametrize(
    ("x", "y"), [(0, 0), (X, Y + 1), (X, FIELD), (Y, X), (FIELD + 1, Y), (2**256 - 1, 2**256 - 1)]
)
def test_what_is_not_on_the_curve_is_refused(x, y):
    good = blind_ids(new_secret(), ["a"])
    with pytest.raises(InvalidMessage, match="VFL-2021"):
        tag_points(new_secret(), good + x.to_bytes(32, "big") + y.to_bytes(32, "big"), new_salt())
