"""Mode `release_once`: noise each record's features once, and reuse the result in every run.

The noised features are stored in a file beside the ledger, by account, so they survive a new alignment. Only
new records, and records whose features have changed, are released again, and charged for it.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from vafl.arrays import Bytes, Integers
from vafl.errors import RunFolderError
from vafl.files import write_atomically
from vafl.privacy.ledger.accounts import NOBODY
from vafl.privacy.ledger.ledger import Ledger
from vafl.privacy.mechanism.noise import Noise
from vafl.privacy.mechanism.release import clip_rows
from vafl.privacy.settings import PrivacySettings

_DIGEST = 16  # bytes
# Rows and bytes of features that are encoded at once: features may be a file larger than memory.
_ROWS, _PART = 4096, 64 << 20


def release_once(
    settings: PrivacySettings,
    features: Tensor,
    ledger: Ledger,
    accounts: Integers,
    noise: Noise,
    encoder: nn.Module,
) -> Tensor:
    """Return the encoded features, clipped and noised. Reuse earlier releases; charge for new ones.

    Args:
        settings: the clip, the noise and the budget.
        features: [rows, ...].
        ledger: the ledger to charge. Its path decides where releases are stored.
        accounts: [rows], each row's account in the ledger.
        noise: the noise generator.
        encoder: frozen layers that were not trained on these records. nn.Identity() releases the features
            themselves.

    Raises:
        BudgetExhausted: the budget does not allow these releases.
        RunFolderError: the file of earlier releases is damaged.
    """
    facts = {
        "ledger": ledger.number,
        "clip": settings.clip,
        "noise": settings.noise,
        "shape": list(features.shape[1:]),
        "encoder": _digest_of(encoder),
    }
    path = None
    if ledger.path is not None:
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]
        path = ledger.path.with_name(f"{ledger.path.stem}-{name}.released")
    digests = _digests(features, ledger.number)
    stored = _read(path, facts) if path is not None and path.exists() else None
    stored = stored or _Releases.none(_encoded(encoder, features[:1]))
    places = stored.find(accounts, digests)
    new, limit = np.flatnonzero(places < 0), settings.limit
    ledger.require_within(accounts[places >= 0], limit)
    if not len(new):
        return stored.features[torch.from_numpy(places)]
    # Charge durably before drawing noise. A crash in between charges for a release that is then made again,
    # which overstates the cost but never understates it.
    ledger.require(accounts[new], "release", settings.upload_cost, limit)
    fresh = clip_rows(_encoded(encoder, features[torch.from_numpy(new)]), settings.clip)
    released = torch.empty(len(features), *fresh.shape[1:])
    released[torch.from_numpy(new)] = torch.from_numpy(noise.added_to(fresh.numpy(), settings.noise))
    old = np.flatnonzero(places >= 0)
    released[torch.from_numpy(old)] = stored.features[torch.from_numpy(places[old])]
    if path is not None:
        records = new[accounts[new] != NOBODY]
        stored = stored.replaced(accounts[records], digests[records], released[torch.from_numpy(records)])
        write_atomically(path, stored.as_bytes(facts), private=True)
    return released


@dataclass(frozen=True)
class _Releases:
    """The stored releases, one per account.

    Attributes:
        accounts: [releases], distinct account numbers.
        digests: [releases, bytes], digests of the original features, which detect that they have changed.
        features: [releases, ...], the noised features.
    """

    accounts: Integers
    digests: Bytes
    features: Tensor

    @classmethod
    def none(cls, features: Tensor) -> "_Releases":
        """Return no releases, for noised features of the same shape as `features`."""
        return cls(np.empty(0, dtype=np.int64), np.empty((0, _DIGEST), dtype=np.uint8), features[:0])

    def find(self, accounts: Integers, digests: Bytes) -> Integers:
        """Return the position of each row's release: [rows]; -1 if its features have not been released."""
        if not len(self.accounts):
            return np.full(len(accounts), -1)
        place_of = np.full(max(accounts.max(), self.accounts.max()) + 2, -1)  # index NOBODY (-1) is last
        place_of[self.accounts] = np.arange(len(self.accounts))
        places = place_of[accounts]
        return np.where((self.digests[places] == digests).all(1), places, -1)

    def replaced(self, accounts: Integers, digests: Bytes, features: Tensor) -> "_Releases":
        """Return these releases and all earlier ones of other accounts."""
        others = np.flatnonzero(~np.isin(self.accounts, accounts))
        return _Releases(
            np.concatenate([self.accounts[others], accounts]),
            np.concatenate([self.digests[others], digests]),
            torch.cat([self.features[torch.from_numpy(others)], features]),
        )

    def as_bytes(self, facts: dict[str, object]) -> bytes:
        tensors = {
            "accounts": torch.from_numpy(self.accounts),
            "digests": torch.from_numpy(self.digests),
            "features": self.features,
        }
        return save(tensors, {"facts": json.dumps(facts)})


@torch.no_grad()
def _encoded(encoder: nn.Module, features: Tensor) -> Tensor:
    return torch.cat([encoder.eval()(part) for part in _parts(features)])


def _parts(features: Tensor) -> tuple[Tensor, ...]:
    """Return views of a few rows each."""
    row_bytes = features.element_size() * math.prod(features.shape[1:])
    return torch.split(features, max(1, min(_ROWS, _PART // max(1, row_bytes))))


def _digest_of(encoder: nn.Module) -> str:
    content = hashlib.sha256(repr(encoder).encode())
    for tensor in encoder.state_dict().values():
        content.update(tensor.numpy().tobytes())
    return content.hexdigest()


def _digests(features: Tensor, key: str) -> Bytes:
    """Return a digest of each row's features: [rows, bytes].

    The ledger's number is the key. Without the ledger, an attacker cannot test guesses of the features.
    """
    rows = (row.tobytes() for part in _parts(features) for row in part.contiguous().numpy())
    digests = b"".join(hashlib.blake2b(row, digest_size=_DIGEST, key=key.encode()).digest() for row in rows)
    return np.frombuffer(digests, dtype=np.uint8).reshape(-1, _DIGEST)


def _read(path: Path, facts: dict[str, object]) -> _Releases:
    try:
        with safe_open(path, framework="pt") as file:
            if json.loads(file.metadata()["facts"]) != facts:
                raise ValueError("it belongs to another ledger")
            accounts, digests = file.get_tensor("accounts").numpy(), file.get_tensor("digests").numpy()
            return _Releases(accounts, digests, file.get_tensor("features"))
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise RunFolderError(
            "VFL-5081",
            f'"{path}", the file of released features, is damaged: {error}. Restore a copy, or remove it to '
            "release the features again, which charges the budget again.",
        ) from error
