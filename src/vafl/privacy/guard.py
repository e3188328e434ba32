"""Everything that stands between one client's records and the network, made from the settings."""

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

from vafl.errors import RunFolderError
from vafl.files import write_atomically
from vafl.privacy.layers import HiddenNoise, require_separate_records
from vafl.privacy.ledger import Kind, Ledger, Records
from vafl.privacy.noise import Noise
from vafl.privacy.records import NoisyUpdates
from vafl.privacy.release import Release, clip_rows, split_last
from vafl.privacy.settings import PrivacySettings


class Budget:
    """What a client may still upload, by row of the run.

    Args:
        records: [rows], which record of the ledger each row is.
        local_steps: updates a batch is used for.
    """

    def __init__(self, ledger: Ledger, settings: PrivacySettings, records: Records, local_steps: int) -> None:
        self.ledger = ledger
        self._records, self._limit = records, settings.mu_max or math.inf
        self._in_order = bool((records == np.arange(len(records))).all())
        self._free = settings.kind == "release_once"  # what follows the release costs nothing
        self._trains = settings.kind == "embed_only"  # the only mode whose bound asks for the first use
        self._upload = settings.upload_cost
        self._batch = settings.batch_cost(local_steps)

    def spend(self, rows: Tensor, kind: Kind, *, whole: bool = False) -> Tensor:
        """Charges an upload, durably, and gives the rows that may be uploaded; `whole`: all or none."""
        if self._free:
            return rows
        batch = kind == "batch"
        charged = self.ledger.charge(
            rows.numpy() if self._in_order else self._records[rows.numpy()],
            kind,
            self._batch if batch else self._upload,
            limit=self._limit,
            whole=whole,
            trains=batch and self._trains,
        )
        return rows if charged.all() else rows[torch.from_numpy(charged)]


@dataclass(frozen=True)
class Guard:
    """A client's parts, made private.

    Attributes:
        features: what the client trains on and embeds.
        model: the embedding model, up to where its upload is noised.
        release: clips, noises and finishes what the model gives; None if nothing is left to do.
        updates: embeds a batch and knows the way back to noised gradients; None for plain gradients.
        budget: the records' account.
    """

    features: Tensor
    model: nn.Module
    release: Release | None
    updates: NoisyUpdates | None
    budget: Budget

    def whole_model(self) -> nn.Module:
        """Features -> embeddings as they leave."""
        return self.model if self.release is None else nn.Sequential(self.model, self.release)


def guard(
    settings: PrivacySettings,
    model: nn.Module,
    features: Tensor,
    ledger: Ledger,
    records: Records,
    local_steps: int = 1,
) -> Guard:
    """Makes a client private.

    Args:
        features: [rows, ...] of all rows that may ever be uploaded.
        records: [rows], which record of the ledger each row is.

    Raises:
        ConfigError: the model would carry records past the noise.
        BudgetExhausted: the features cannot be released any more.
    """
    noise = Noise()
    if settings.kind != "embed_only":
        require_separate_records(model, noise.gaussian((4, *features.shape[1:]), 1.0))
    budget = Budget(ledger, settings, records, local_steps)
    if settings.kind == "release_once":
        return Guard(_release_once(settings, features, ledger, records, noise), model, None, None, budget)
    if settings.kind == "frozen":
        model.requires_grad_(False)
    body, rest = split_last(model) if settings.placement == "pre-activation" else (model, nn.Identity())
    hidden = HiddenNoise(body, settings, noise) if settings.layers else None
    updates = None
    if settings.kind == "dp_train":
        trained = [parameter for parameter in body.parameters() if parameter.requires_grad]
        clip, deviation = settings.gradient_clip, settings.gradient_noise
        updates = NoisyUpdates(body, trained, clip, deviation, noise, hidden)
    return Guard(features, body, Release(settings.clip, settings.noise, rest, noise), updates, budget)


def _release_once(
    settings: PrivacySettings, features: Tensor, ledger: Ledger, records: Records, noise: Noise
) -> Tensor:
    """The features, clipped and noised: those released before, or new ones for a new charge.

    Beside the ledger lies what was released, so that another run on the same records costs nothing.
    """
    path = None if ledger.path is None else ledger.path.with_suffix(".released")
    facts = {
        "clip": settings.clip,
        "noise": settings.noise,
        "records": hashlib.sha256(records.tobytes() + features.numpy().tobytes()).hexdigest(),
    }
    if path is not None and path.exists() and (known := _read_released(path, facts)) is not None:
        return known
    ledger.require(np.asarray(records), "release", settings.upload_cost, settings.mu_max or math.inf)
    released = clip_rows(features, settings.clip) + noise.gaussian(features.shape, settings.noise)
    if path is not None:
        write_atomically(path, save({"features": released}, {"facts": json.dumps(facts)}))
    return released


def _read_released(path: Path, facts: dict[str, object]) -> Tensor | None:
    """What was released for exactly these records and settings, if it was."""
    try:
        with safe_open(path, framework="pt") as file:
            if json.loads(file.metadata()["facts"]) != facts:
                return None
            features: Tensor = file.get_tensor("features")
            return features
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise RunFolderError(
            f'"{path}" holds the features as they were released, and is damaged: {error}. Remove it to '
            "release them again, which is charged again."
        ) from error
