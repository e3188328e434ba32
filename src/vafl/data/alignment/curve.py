"""Hash ids to points of secp256k1, multiply points by a secret, and digest them, many at a time.

The curve's order is prime, so every finite point generates the whole group: there is no point of small order
that a peer could send to learn a secret modulo that order. The point at infinity has no coordinates, so it
cannot be sent.

A chunk of points is a byte string with 64 bytes per point: the x and the y coordinate. This module calls
libsecp256k1 through coincurve's bindings and reuses one point's memory for a whole chunk. coincurve's own
classes allocate objects for each step of each point, which takes 10 % longer.

Worker processes load this module, so it imports little.
"""

import hashlib
import secrets
from typing import Self

from coincurve import GLOBAL_CONTEXT, PrivateKey
from coincurve._libsecp256k1 import ffi, lib

from vafl.errors import InvalidMessage

POINT, TAG, SALT = 64, 16, 16  # bytes
# BLAKE2b personalisation strings. One per purpose, so that a digest for one purpose is useless for another.
_HASH, _MATCH, _BIND = b"vafl psi hash 2", b"vafl psi match 3", b"vafl psi bind 3"
_UNCOMPRESSED = b"\x04"  # SEC 1 prefix of a point that is written with both coordinates
_SERIALIZED = len(_UNCOMPRESSED) + POINT


def new_secret() -> bytes:
    """Return a random scalar. Use it for one exchange only."""
    return PrivateKey().secret


def new_salt() -> bytes:
    """Return a random salt for a client's tags in one exchange."""
    return secrets.token_bytes(SALT)


def bound(salt: bytes, client: str) -> bytes:
    """Return the salt bound to the client's name.

    Tags that are made with it match no other client's tags, even if a relay forwards the same points.
    """
    return hashlib.blake2b(salt + client.encode(), digest_size=SALT, person=_BIND).digest()


def blind_ids(secret: bytes, ids: list[str]) -> bytes:
    """Hash each id to a point and multiply it by the secret."""
    point = _Point()
    return b"".join([point.hash(text).multiply(secret).coordinates() for text in ids])


def tag_points(secret: bytes, points: bytes, salt: bytes) -> bytes:
    """Multiply each point by the secret and return a short digest of each product.

    The receiver can compare digests, but cannot multiply them further as it could with points.

    Args:
        salt: the client's salt, bound to its name.

    Raises:
        InvalidMessage: the bytes from the other party are not points of the curve.
    """
    point = _Point()
    received = (points[at : at + POINT] for at in range(0, len(points), POINT))
    products = (point.read(each).multiply(secret).coordinates() for each in received)
    return b"".join(
        [hashlib.blake2b(each, digest_size=TAG, person=_MATCH, salt=salt).digest() for each in products]
    )


class _Point:
    """A mutable point. Each method overwrites it in place and returns it, to chain calls."""

    def __init__(self) -> None:
        self._key = ffi.new("secp256k1_pubkey *")
        self._memory = ffi.new("unsigned char[]", _SERIALIZED)
        self._length = ffi.new("size_t *", _SERIALIZED)
        self._serialized = ffi.buffer(self._memory)

    def hash(self, text: str) -> Self:
        """Set the point to the hash of an id: BLAKE2b to 64 bytes, then ElligatorSwift to the curve.

        The result is close to uniform over the curve, and its discrete logarithm is unknown.
        """
        digest = hashlib.blake2b(text.encode(), digest_size=64, person=_HASH).digest()
        lib.secp256k1_ellswift_decode(GLOBAL_CONTEXT.ctx, self._key, digest)
        return self

    def read(self, coordinates: bytes) -> Self:
        """Set the point to these coordinates.

        Raises:
            InvalidMessage: they are not on the curve.
        """
        serialized = _UNCOMPRESSED + coordinates
        if not lib.secp256k1_ec_pubkey_parse(GLOBAL_CONTEXT.ctx, self._key, serialized, _SERIALIZED):
            raise InvalidMessage(
                "VFL-2021",
                "points must be on the curve secp256k1. Found one that is not. Check that both parties run "
                "the same version of vafl.",
            )
        return self

    def multiply(self, secret: bytes) -> Self:
        """Multiply the point by a scalar."""
        if not lib.secp256k1_ec_pubkey_tweak_mul(GLOBAL_CONTEXT.ctx, self._key, secret):
            raise ValueError("a secret must be a scalar of the curve, and not 0")
        return self

    def coordinates(self) -> bytes:
        """Return x and y, 64 bytes."""
        lib.secp256k1_ec_pubkey_serialize(
            GLOBAL_CONTEXT.ctx, self._memory, self._length, self._key, lib.SECP256K1_EC_UNCOMPRESSED
        )
        coordinates: bytes = self._serialized[len(_UNCOMPRESSED) :]
        return coordinates
