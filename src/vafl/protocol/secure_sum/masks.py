"""Pairwise masks: each upload looks random, and the sum over all clients is exact.

Each pair of clients agrees on a secret (X25519, with a new key pair in each epoch). From the secret both
derive the same stream of random words for each round. One adds the stream to its scores, the other subtracts
it. To anyone who lacks one of its masks, a masked score is uniform modulo 2^64. In the sum all masks cancel.

A mask used twice would reveal a difference of scores. So a key pair serves one epoch, and a stream serves one
round. The key of a stream depends on its use: run, epoch, all clients' keys, purpose, number, rows and width.
If the server tells clients different things, their masks differ and the sum is noise.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from vafl.arrays import Matrix, RowIds, Words
from vafl.errors import InvalidMessage
from vafl.protocol.secure_sum.fixed_point import encode

KEY_BYTES = 32
_DOMAIN = b"vafl secure sum 1"


class KeySigner(Protocol):
    """Signs statements of this party and checks the signatures of others."""

    def sign(self, statement: bytes) -> bytes:
        """Return a proof that this party made the statement."""

    def check(self, party: str, statement: bytes, proof: bytes) -> None:
        """Raise Unauthenticated unless `party` made the statement."""


class NoKeySigner:
    """Signs nothing. For parties on one machine only: a server that relays keys could replace them."""

    def sign(self, statement: bytes) -> bytes:
        return b""

    def check(self, party: str, statement: bytes, proof: bytes) -> None:
        """Accept every statement."""


class KeyAgreement:
    """Makes the keys of one client, one epoch at a time, and checks the keys of the others.

    Args:
        run_id: identifies the run. Keys are valid for one run.
        parties: the clients' names, in order.
        index: the position of this client in `parties`.
        signer: signs this client's keys and checks the signatures of the others.
    """

    def __init__(self, run_id: str, parties: Sequence[str], index: int, signer: KeySigner) -> None:
        self._run_id, self._parties, self._index, self._signer = run_id, list(parties), index, signer
        self._private: X25519PrivateKey | None = None
        self._offered = b""

    def offer(self, epoch: int) -> bytes:
        """Return a fresh public key and the proof that it belongs to this client."""
        self._private = X25519PrivateKey.generate()
        key = self._private.public_key().public_bytes_raw()
        self._offered = key + self._signer.sign(self._statement(epoch, self._index, key))
        return self._offered

    def agree(self, epoch: int, offers: Sequence[bytes]) -> "Masks":
        """Return the masks of an epoch, derived from the offers of all clients.

        Raises:
            InvalidMessage: there is not one offer per client, or this client's offer is not among them.
            Unauthenticated: the proof of a key is not valid for its client.
        """
        # Delete the private key, also if the checks fail: a key pair must not serve two sets of offers.
        private, self._private = self._private, None
        if private is None or len(offers) != len(self._parties) or offers[self._index] != self._offered:
            raise InvalidMessage(
                "VFL-4141",
                f"the keys of epoch {epoch} must be one from each of {len(self._parties)} clients, including "
                f"the one that this client offered last. Found {len(offers)} keys, or another key of this "
                "client. The server may be dishonest.",
            )
        keys = [offer[:KEY_BYTES] for offer in offers]
        for party, (key, offer) in enumerate(zip(keys, offers, strict=True)):
            self._signer.check(self._parties[party], self._statement(epoch, party, key), offer[KEY_BYTES:])
        transcript = _digest(*(self._statement(epoch, party, key) for party, key in enumerate(keys)))
        return Masks(
            self._index, [self._pair(private, other, key, transcript) for other, key in enumerate(keys)]
        )

    def _statement(self, epoch: int, party: int, key: bytes) -> bytes:
        """Return the bytes that a client signs: this is my key, in this epoch of this run."""
        return _joined(
            _DOMAIN, self._run_id.encode(), struct.pack("<Q", epoch), self._parties[party].encode(), key
        )

    def _pair(self, private: X25519PrivateKey, other: int, key: bytes, transcript: bytes) -> bytes:
        """Return the secret key shared with another client; empty for this client itself."""
        if other == self._index:
            return b""
        try:
            secret = private.exchange(X25519PublicKey.from_public_bytes(key))
        except ValueError as error:
            # The key has the wrong length, or is a point of small order. With such a point the secret would
            # be 0 whatever this client's key is, so anyone could compute the masks of this pair.
            raise InvalidMessage(
                "VFL-4142",
                f"the key of {self._parties[other]} must be a valid X25519 public key. Found {len(key)} "
                "bytes that are not.",
            ) from error
        pair = struct.pack("<II", *sorted((self._index, other)))
        return HKDF(SHA256(), 32, None, _joined(_DOMAIN, transcript, pair)).derive(secret)


class Masks:
    """The masks of one client in one epoch. Each mask is used once.

    Args:
        index: the number of this client.
        pairs: the key shared with each client, in order.
    """

    def __init__(self, index: int, pairs: Sequence[bytes]) -> None:
        self._index, self._pairs = index, list(pairs)
        self._last: dict[str, int] = {}

    def hide(self, purpose: str, number: int, rows: RowIds, scores: Matrix) -> Words:
        """Return scores [rows, width] in fixed point, masked for one round.

        Args:
            purpose: "batch" or "evaluation". Each purpose has its own round numbers.
            number: the number of the round. It must grow.
            rows: the rows of the scores. The masks cancel only if all clients use the same rows.

        Raises:
            InvalidMessage: the masks of this round have been used.
            Diverged: a score is too large.
        """
        words = encode(scores, len(self._pairs))
        if number <= self._last.get(purpose, -1):
            raise InvalidMessage(
                "VFL-4143",
                f"each mask is used once. Found {purpose} round {number} requested after round "
                f"{self._last[purpose]}. The server may be dishonest.",
            )
        self._last[purpose] = number
        header = struct.pack("<QII", number, *scores.shape)
        label = _joined(_DOMAIN, purpose.encode(), header, rows.astype("<i8").tobytes())
        # Of each pair, the client with the smaller number adds the stream and the other one subtracts it.
        for other, key in enumerate(self._pairs):
            if other > self._index:
                words += _stream(key, label, words.shape)
            elif other < self._index:
                words -= _stream(key, label, words.shape)
        return words


def _stream(key: bytes, label: bytes, shape: tuple[int, ...]) -> Words:
    """Return pseudo-random words from AES in counter mode.

    The AES key is derived for this label only, so the counter can start at 0.
    """
    stream_key = HKDFExpand(SHA256(), 32, _digest(label)).derive(key)
    encryptor = Cipher(algorithms.AES(stream_key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * int(np.prod(shape)))), "<u8").reshape(shape)


def _joined(*parts: bytes) -> bytes:
    """Join the parts, each after its length, so that different lists of parts give different bytes."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(_joined(*parts)).digest()
