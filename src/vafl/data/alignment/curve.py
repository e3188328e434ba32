"""Points of secp256k1, many at a time: ids hashed to it, multiplied by a secret, digested.

The curve's order is prime, so every point but none at all is as good as any other. Points are pairs of
coordinates, 64 bytes each, one after the other. libsecp256k1 is called as coincurve binds it, on one point's
memory for all of a chunk: coincurve's own objects, new ones for each step of each point, cost a tenth more.
Worker processes load this module, so it imports little.
"""

import hashlib
import secrets
from typing import Self

from coincurve import GLOBAL_CONTEXT, PrivateKey
from coincurve._libsecp256k1 import ffi, lib

from vafl.errors import InvalidMessage

POINT, TAG, SALT = 64, 16, 16  # bytes
_HASH, _MATCH, _BIND = b"vafl psi hash 2", b"vafl psi match 3", b"vafl psi bind 3"  # one for each purpose
_BOTH = b"\x04"  # before two coordinates
_WRITTEN = len(_BOTH) + POINT


def new_secret() -> bytes:
    """A scalar for one exchange and no other."""
    return PrivateKey().secret


def new_salt() -> bytes:
    """A client's, for its tags in one exchange."""
    return secrets.token_bytes(SALT)


def bound(salt: bytes, client: str) -> bytes:
    """The salt in this client's name: whoever passes points on, its tags compare with no other client's."""
    return hashlib.blake2b(salt + client.encode(), digest_size=SALT, person=_BIND).digest()


def blind_ids(secret: bytes, ids: list[str]) -> bytes:
    """Each id hashed to a point, multiplied by the secret."""
    point = _Point()
    return b"".join([point.hash(text).multiply(secret).coordinates() for text in ids])


def tag_points(secret: bytes, points: bytes, salt: bytes) -> bytes:
    """Each point multiplied by the secret, as a short digest: enough to compare, nothing to go on with.

    Args:
        salt: the client's, bound to its name.

    Raises:
        InvalidMessage: what came from the other party are no points.
    """
    point = _Point()
    theirs = (points[at : at + POINT] for at in range(0, len(points), POINT))
    return b"".join([_tag(point.read(each).multiply(secret).coordinates(), salt) for each in theirs])


def _tag(point: bytes, salt: bytes) -> bytes:
    return hashlib.blake2b(point, digest_size=TAG, person=_MATCH, salt=salt).digest()


class _Point:
    """Memory for a point, and what can be done to the point in it."""

    def __init__(self) -> None:
        self._key = ffi.new("secp256k1_pubkey *")
        self._memory, self._length = ffi.new("unsigned char[]", _WRITTEN), ffi.new("size_t *", _WRITTEN)
        self._written = ffi.buffer(self._memory)

    def hash(self, text: str) -> Self:
        """Becomes the point of an id, as good as drawn at random for each: BLAKE2b, then ElligatorSwift."""
        digest = hashlib.blake2b(text.encode(), digest_size=64, person=_HASH).digest()
        lib.secp256k1_ellswift_decode(GLOBAL_CONTEXT.ctx, self._key, digest)
        return self

    def read(self, coordinates: bytes) -> Self:
        """Becomes that point.

        Raises:
            InvalidMessage: there is none.
        """
        if not lib.secp256k1_ec_pubkey_parse(GLOBAL_CONTEXT.ctx, self._key, _BOTH + coordinates, _WRITTEN):
            raise InvalidMessage("VFL-2021", "points must be on the curve secp256k1. Found one that is not.")
        return self

    def multiply(self, secret: bytes) -> Self:
        if not lib.secp256k1_ec_pubkey_tweak_mul(GLOBAL_CONTEXT.ctx, self._key, secret):
            raise ValueError("a secret must be a scalar of the curve, and not 0")
        return self

    def coordinates(self) -> bytes:
        lib.secp256k1_ec_pubkey_serialize(
            GLOBAL_CONTEXT.ctx, self._memory, self._length, self._key, lib.SECP256K1_EC_UNCOMPRESSED
        )
        coordinates: bytes = self._written[len(_BOTH) :]
        return coordinates
