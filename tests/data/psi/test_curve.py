import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from nacl.bindings import crypto_core_ed25519_is_valid_point

from vafl.data.psi.curve import POINT, TAG, _hash_to_curve, blind_ids, new_secret, tag_points
from vafl.errors import InvalidMessage

PRIME = 2**255 - 19


def split(content, size):
    return [content[place : place + size] for place in range(0, len(content), size)]


def test_both_orders_of_the_secrets_end_in_the_same_tags_and_only_for_the_same_ids():
    one, other = new_secret(), new_secret()
    ids, others = ["a", "007", "ü"], ["7", "a", "ü", "A"]
    ours = split(tag_points(other, blind_ids(one, ids)), TAG)
    theirs = split(tag_points(one, blind_ids(other, others)), TAG)
    assert [text for text, tag in zip(ids, ours, strict=True) if tag in theirs] == ["a", "ü"]
    assert len({*ours, *theirs}) == 5


def test_nothing_that_is_sent_is_the_same_twice():
    """Neither ids nor their hashes travel: fresh secrets give other bytes for the same ids."""
    ids = ["customer-1", "customer-2"]
    sent = [blind_ids(new_secret(), ids) for _ in range(3)]
    assert len({point for each in sent for point in split(each, POINT)}) == 6
    assert not set(split(b"".join(sent), POINT)) & set(_hash_to_curve(ids))


def test_ids_are_hashed_to_the_subgroup_of_prime_order():
    for point in _hash_to_curve(["a", "b", "", "x" * 1000]):
        u = int.from_bytes(point, "little")
        y = (u - 1) * pow(u + 1, -1, PRIME) % PRIME
        assert crypto_core_ed25519_is_valid_point(y.to_bytes(32, "little"))


def test_the_hash_is_the_same_for_every_version():
    """Parties may have different versions: a hash that changes needs another frames.PROTOCOL."""
    assert (
        _hash_to_curve(["007"])[0].hex() == "dfc9864cd92962d9e600db78330232ed2199effe401be274887672045ddf7034"
    )


def test_points_are_those_of_rfc_7748():
    (point,) = _hash_to_curve(["a"])
    secret = new_secret()
    own = X25519PrivateKey.from_private_bytes(secret)
    assert blind_ids(secret, ["a"]) == own.exchange(X25519PublicKey.from_public_bytes(point))


@pytest.mark.parametrize("number", [0, 1, PRIME - 1, PRIME, PRIME + 1, 2**255, 2**256 - 1])
def test_points_of_small_order_and_numbers_too_large_are_refused(number):
    with pytest.raises(InvalidMessage, match=r"small order|below 2"):
        tag_points(new_secret(), number.to_bytes(32, "little"))
