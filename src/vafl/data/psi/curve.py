"""Points of Curve25519, many at a time: ids hashed to it, multiplied by a secret, digested.

Points are u-coordinates as RFC 7748 has them, 32 bytes each, one after the other. Worker processes load
this module, so it imports little.
"""

import hashlib
import secrets

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from nacl.bindings import crypto_core_ed25519_from_uniform

from vafl.errors import InvalidMessage

POINT, TAG = 32, 16  # bytes
_PRIME = 2**255 - 19
_HASH, _MATCH = b"vafl psi hash 1", b"vafl psi match 1"  # one hash function for each purpose


def new_secret() -> bytes:
    """A scalar for one exchange and no other."""
    return secrets.token_bytes(32)


def blind_ids(secret: bytes, ids: list[str]) -> bytes:
    """Each id hashed to a point, multiplied by the secret."""
    return b"".join(_multiply(secret, _hash_to_curve(ids)))


def tag_points(secret: bytes, points: bytes) -> bytes:
    """Each point multiplied by the secret, as a short digest: enough to compare, nothing to go on with.

    Raises:
        InvalidMessage: what came from the other party are no points.
    """
    theirs = [points[place : place + POINT] for place in range(0, len(points), POINT)]
    if any(int.from_bytes(point, "little") >= _PRIME for point in theirs):
        raise InvalidMessage("a point must be a number below 2^255 - 19. Found a larger one.")
    try:
        shared = _multiply(secret, theirs)
    except ValueError:
        raise InvalidMessage("a point must be of large order. Found one of small order.") from None
    return b"".join(hashlib.blake2b(point, digest_size=TAG, person=_MATCH).digest() for point in shared)


def _multiply(secret: bytes, points: list[bytes]) -> list[bytes]:
    """Raises ValueError for a point of small order, whose every multiple by such a secret is the same."""
    multiply, parse = X25519PrivateKey.from_private_bytes(secret).exchange, X25519PublicKey.from_public_bytes
    return [multiply(parse(point)) for point in points]


def _hash_to_curve(ids: list[str]) -> list[bytes]:
    """By Elligator 2, in the subgroup of prime order, whose discrete logarithms nobody knows."""
    heights = []
    for text in ids:
        uniform = hashlib.blake2b(text.encode(), digest_size=32, person=_HASH).digest()
        point = crypto_core_ed25519_from_uniform(uniform)
        heights.append(int.from_bytes(point, "little") & (2**255 - 1))
    inverses = _inverses([1 - y for y in heights])
    return [
        ((1 + y) * inverse % _PRIME).to_bytes(POINT, "little")
        for y, inverse in zip(heights, inverses, strict=True)
    ]


def _inverses(values: list[int]) -> list[int]:
    """Modulo the prime, all at the price of one (Montgomery's trick)."""
    products = [1]
    for value in values:
        products.append(products[-1] * value % _PRIME)
    inverse = pow(products[-1], -1, _PRIME)
    inverses = [0] * len(values)
    for place in range(len(values) - 1, -1, -1):
        inverses[place] = products[place] * inverse % _PRIME
        inverse = inverse * values[place] % _PRIME
    return inverses
