"""Pairwise masks: what each client uploads looks random, and the sum over all clients is exact.

Every two clients agree on a secret (X25519, a new key pair each epoch). For each round it gives both the
same stream of random words; one adds it to its scores, the other subtracts it. Modulo 2^64 a masked score
is uniform to whoever lacks one of its masks, and all masks cancel in the sum.

A mask used twice would reveal a difference of scores, so a key pair serves one epoch, and a stream one
round. What a stream is for (run, epoch, everybody's keys, purpose, number, rows, width) goes into its key:
clients that were told different things mask differently, and their sum is noise.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from vafl.errors import InvalidMessage
from vafl.protocol.secure_sum.fixed_point import Scores, Words, encode

Rows = npt.NDArray[np.int64]

KEY_BYTES = 32
_DOMAIN = b"vafl secure sum 1"


class KeySigner(Protocol):
    """Proves whose a statement is, and checks others' proofs."""

    def vouch(self, statement: bytes) -> bytes:
        """A proof that this party made the statement."""

    def check(self, party: str, statement: bytes, proof: bytes) -> None:
        """Raises Unauthenticated unless `party` made it."""


class NoKeySigner:
    """For parties on one machine only: nothing is proved, so whoever relays keys could replace them."""

    def vouch(self, statement: bytes) -> bytes:
        return b""

    def check(self, party: str, statement: bytes, proof: bytes) -> None:
        """Believes anything."""


class KeyAgreement:
    """One client's keys, an epoch at a time.

    Args:
        run_id: keys are for this run only.
        parties: the clients' names, in their order.
        index: which of them this is.
        witness: signs this client's keys and checks the others'.
    """

    def __init__(self, run_id: str, parties: Sequence[str], index: int, witness: KeySigner) -> None:
        self._run_id, self._parties, self._index, self._witness = run_id, list(parties), index, witness
        self._private: X25519PrivateKey | None = None
        self._offered = b""

    def offer(self, epoch: int) -> bytes:
        """A new public key and the proof that it is this client's, for the others."""
        self._private = X25519PrivateKey.generate()
        key = self._private.public_key().public_bytes_raw()
        self._offered = key + self._witness.vouch(self._statement(epoch, self._index, key))
        return self._offered

    def agree(self, epoch: int, offers: Sequence[bytes]) -> "Masks":
        """The masks of an epoch, from what every client has offered; the own key is used up.

        Raises:
            InvalidMessage: these are not one offer each of all clients, this one's among them.
            Unauthenticated: a key is not proved to be that client's.
        """
        private, self._private = self._private, None
        if private is None or len(offers) != len(self._parties) or offers[self._index] != self._offered:
            raise InvalidMessage(
                "VFL-4141",
                f"the keys of epoch {epoch} must be one of each of {len(self._parties)} clients, with the "
                "one this client offered last. Found others: is the server honest?",
            )
        keys = [offer[:KEY_BYTES] for offer in offers]
        for party, (key, offer) in enumerate(zip(keys, offers, strict=True)):
            self._witness.check(self._parties[party], self._statement(epoch, party, key), offer[KEY_BYTES:])
        transcript = _digest(*(self._statement(epoch, party, key) for party, key in enumerate(keys)))
        return Masks(
            self._index, [self._pair(private, other, key, transcript) for other, key in enumerate(keys)]
        )

    def _statement(self, epoch: int, party: int, key: bytes) -> bytes:
        """What a client proves: this is my key, in this epoch of this run."""
        return _joined(
            _DOMAIN, self._run_id.encode(), struct.pack("<Q", epoch), self._parties[party].encode(), key
        )

    def _pair(self, private: X25519PrivateKey, other: int, key: bytes, transcript: bytes) -> bytes:
        """The key this client shares with another one; none with itself."""
        if other == self._index:
            return b""
        try:
            secret = private.exchange(X25519PublicKey.from_public_bytes(key))
        except ValueError as error:  # too short, or a point that would give away the secret
            raise InvalidMessage(
                "VFL-4142", f"the key of {self._parties[other]} must be an X25519 public key."
            ) from error
        pair = struct.pack("<II", *sorted((self._index, other)))
        return HKDF(SHA256(), 32, None, _joined(_DOMAIN, transcript, pair)).derive(secret)


class Masks:
    """One client's masks of one epoch; each is used once.

    Args:
        index: which client this is.
        pairs: the key shared with each client, in their order.
    """

    def __init__(self, index: int, pairs: Sequence[bytes]) -> None:
        self._index, self._pairs = index, list(pairs)
        self._last: dict[str, int] = {}

    def hide(self, purpose: str, number: int, rows: Rows, scores: Scores) -> Words:
        """Scores [rows, width] in fixed point, under this client's masks of one round.

        Args:
            purpose: rounds of different purposes are numbered separately.
            number: of the round; it grows.
            rows: which rows these are: the sum comes out only if all clients mean the same.

        Raises:
            InvalidMessage: the masks of this round were used already.
            Diverged: a score is too large.
        """
        words = encode(scores, len(self._pairs))
        if number <= self._last.get(purpose, -1):
            raise InvalidMessage(
                "VFL-4143",
                f"masks are used once. Found {purpose} round {number} asked for after round "
                f"{self._last[purpose]}: is the server honest?",
            )
        self._last[purpose] = number
        what = struct.pack("<QII", number, *scores.shape)
        label = _joined(_DOMAIN, purpose.encode(), what, rows.astype("<i8").tobytes())
        for other, key in enumerate(self._pairs):
            if other > self._index:
                words += _stream(key, label, words.shape)
            elif other < self._index:
                words -= _stream(key, label, words.shape)
        return words


def _stream(key: bytes, label: bytes, shape: tuple[int, ...]) -> Words:
    """Random words from AES in counter mode, whose key serves this label only."""
    own = HKDFExpand(SHA256(), 32, _digest(label)).derive(key)
    encryptor = Cipher(algorithms.AES(own), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * int(np.prod(shape)))), "<u8").reshape(shape)


def _joined(*parts: bytes) -> bytes:
    """The parts with their lengths, so that no two lists of parts look the same."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(_joined(*parts)).digest()
