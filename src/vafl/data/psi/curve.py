"""Points of secp256k1, many at a time: ids hashed to it, multiplied by a secret, digested.

The curve's order is prime, so every point but none at all is as good as any other. Points are pairs of
coordinates, 64 bytes each, one after the other. Worker processes load this module, so it imports little.
"""

import hashlib

from coincurve import PrivateKey, PublicKey

from vafl.errors import InvalidMessage

POINT, TAG = 64, 16  # bytes
_HASH, _MATCH = b"vafl psi hash 1", b"vafl psi match 1"  # one hash function for each purpose
_EVEN, _BOTH = b"\x02", b"\x04"  # before an x-coordinate alone, before both
_ATTEMPTS = 256  # every other number is an x-coordinate


def new_secret() -> bytes:
    """A scalar for one exchange and no other."""
    return PrivateKey().secret


def blind_ids(secret: bytes, ids: list[str]) -> bytes:
    """Each id hashed to a point, multiplied by the secret."""
    return b"".join(_multiply(_hash_to_curve(text), secret) for text in ids)


def tag_points(secret: bytes, points: bytes) -> bytes:
    """Each point multiplied by the secret, as a short digest: enough to compare, nothing to go on with.

    Raises:
        InvalidMessage: what came from the other party are no points.
    """
    try:
        theirs = [PublicKey(_BOTH + points[at : at + POINT]) for at in range(0, len(points), POINT)]
    except ValueError:
        raise InvalidMessage("points must be on the curve secp256k1. Found one that is not.") from None
    return b"".join(_tag(_multiply(point, secret)) for point in theirs)


def _multiply(point: PublicKey, secret: bytes) -> bytes:
    return point.multiply(secret, update=True).format(compressed=False)[1:]


def _tag(point: bytes) -> bytes:
    return hashlib.blake2b(point, digest_size=TAG, person=_MATCH).digest()


def _hash_to_curve(text: str) -> PublicKey:
    """The first of the id's hashes that is an x-coordinate, with the even y."""
    content = text.encode()
    for attempt in range(_ATTEMPTS):
        x = hashlib.blake2b(content, digest_size=32, person=_HASH, salt=bytes((attempt,))).digest()
        try:
            return PublicKey(_EVEN + x)
        except ValueError:
            continue
    raise AssertionError("one in 2^256 ids ends here")
