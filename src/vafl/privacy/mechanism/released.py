"""What was released once is used for ever: each person's noised features, kept beside the ledger.

Accounts follow people from alignment to alignment, and so do their releases: only new people, and people
whose features have changed, are released anew and charged for it.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from vafl.errors import RunFolderError
from vafl.files import write_atomically
from vafl.privacy.ledger.accounts import NOBODY, Numbers
from vafl.privacy.ledger.ledger import Ledger
from vafl.privacy.mechanism.noise import Noise
from vafl.privacy.mechanism.release import clip_rows
from vafl.privacy.settings import PrivacySettings

_DIGEST = 16  # bytes
_ROWS = 4096  # encoded at once


def release_once(
    settings: PrivacySettings,
    features: Tensor,
    ledger: Ledger,
    accounts: Numbers,
    noise: Noise,
    encoder: nn.Module,
) -> Tensor:
    """What the encoder makes of the features, clipped and noised: as released before, or anew for a charge.

    Args:
        features: [rows, ...].
        accounts: [rows], which account of the ledger each row is.
        encoder: frozen, and of no record here; nn.Identity() releases the features themselves.
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
    kept = _read(path, facts) if path is not None and path.exists() else None
    kept = kept or _Releases.none(_encoded(encoder, features[:1]))
    places = kept.find(accounts, digests)
    new, limit = np.flatnonzero(places < 0), settings.limit
    ledger.require_within(accounts[places >= 0], limit)
    if not len(new):
        return kept.features[torch.from_numpy(places)]
    ledger.require(accounts[new], "release", settings.upload_cost, limit)
    fresh = clip_rows(_encoded(encoder, features[torch.from_numpy(new)]), settings.clip)
    released = torch.empty(len(features), *fresh.shape[1:])
    released[torch.from_numpy(new)] = torch.from_numpy(noise.added_to(fresh.numpy(), settings.noise))
    old = np.flatnonzero(places >= 0)
    released[torch.from_numpy(old)] = kept.features[torch.from_numpy(places[old])]
    if path is not None:
        own = new[accounts[new] != NOBODY]
        kept = kept.replaced(accounts[own], digests[own], released[torch.from_numpy(own)])
        write_atomically(path, kept.as_bytes(facts), private=True)
    return released


@dataclass(frozen=True)
class _Releases:
    """What was released of each account.

    Attributes:
        accounts: [releases], each once.
        digests: [releases, bytes], of the features that were clipped and noised.
        features: [releases, ...], noised.
    """

    accounts: Numbers
    digests: npt.NDArray[np.uint8]
    features: Tensor

    @classmethod
    def none(cls, features: Tensor) -> "_Releases":
        """None yet, of features such as these."""
        return cls(np.empty(0, dtype=np.int64), np.empty((0, _DIGEST), dtype=np.uint8), features[:0])

    def find(self, accounts: Numbers, digests: npt.NDArray[np.uint8]) -> Numbers:
        """[rows], where the release of each is; -1 where there is none of these features."""
        if not len(self.accounts):
            return np.full(len(accounts), -1)
        place_of = np.full(max(accounts.max(), self.accounts.max()) + 2, -1)  # the last is nobody's
        place_of[self.accounts] = np.arange(len(self.accounts))
        places = place_of[accounts]
        return np.where((self.digests[places] == digests).all(1), places, -1)

    def replaced(self, accounts: Numbers, digests: npt.NDArray[np.uint8], features: Tensor) -> "_Releases":
        """With these in the place of what their accounts had."""
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
    return torch.cat([encoder.eval()(part) for part in torch.split(features, _ROWS)])


def _digest_of(encoder: nn.Module) -> str:
    content = hashlib.sha256(repr(encoder).encode())
    for tensor in encoder.state_dict().values():
        content.update(tensor.numpy().tobytes())
    return content.hexdigest()


def _digests(features: Tensor, key: str) -> npt.NDArray[np.uint8]:
    """[rows, bytes]; nobody without the ledger can try out features."""
    content = features.contiguous().numpy().tobytes()
    size = len(content) // len(features)
    rows = (content[place : place + size] for place in range(0, len(content), size))
    own = b"".join(hashlib.blake2b(row, digest_size=_DIGEST, key=key.encode()).digest() for row in rows)
    return np.frombuffer(own, dtype=np.uint8).reshape(-1, _DIGEST)


def _read(path: Path, facts: dict[str, object]) -> _Releases:
    try:
        with safe_open(path, framework="pt") as file:
            if json.loads(file.metadata()["facts"]) != facts:
                raise ValueError("it is of another ledger")
            accounts, digests = file.get_tensor("accounts").numpy(), file.get_tensor("digests").numpy()
            return _Releases(accounts, digests, file.get_tensor("features"))
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise RunFolderError(
            "VFL-5081",
            f'"{path}" holds the features as they were released, and is damaged: {error}. Remove it to '
            "release them again, which is charged again.",
        ) from error
