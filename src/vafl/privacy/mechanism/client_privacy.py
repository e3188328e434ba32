"""Everything that stands between one client's records and the network, made from the settings."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from vafl.privacy.ledger.accounts import Kind, Numbers
from vafl.privacy.ledger.ledger import Ledger
from vafl.privacy.ledger.repeats import Repeats
from vafl.privacy.mechanism.layers import HiddenNoise, require_separate_records
from vafl.privacy.mechanism.noise import Noise
from vafl.privacy.mechanism.records import NoisyUpdates
from vafl.privacy.mechanism.release import Release, split_frozen, split_last
from vafl.privacy.mechanism.released import release_once
from vafl.privacy.settings import PrivacySettings

_MARK_EVERY = 32  # uploads charged between two marks: the most that a rollback can hide from the server


class Budget:
    """What a client may still upload, by row of the run.

    Args:
        accounts: [rows], which account of the ledger each row is.
        local_steps: updates a batch is used for.
    """

    def __init__(
        self, ledger: Ledger, settings: PrivacySettings, accounts: Numbers, local_steps: int
    ) -> None:
        self.ledger = ledger
        self._accounts, self._limit = accounts, settings.limit
        self._in_order = bool((accounts == np.arange(len(accounts))).all())
        self._free = settings.protection.noises_features  # later uploads are post-processing
        self._trains = settings.protection.carries_records
        self._carried = settings.carried_cost
        self._upload = settings.upload_cost
        self._batch = settings.batch_cost(local_steps)
        self._unmarked = 0  # uploads charged since the last mark
        self._last_mark: bytes | None = None
        self._is_mark_due = False
        # A ledger in memory belongs to a simulation, which has no server to watch.
        self._repeats = Repeats(ledger, accounts, self._limit) if ledger.path is not None else None

    def spend(self, rows: Numbers, kind: Kind, *, whole: bool = False) -> Numbers:
        """Charge an upload durably; return the rows that may be uploaded. `whole`: all of them or none."""
        if self._free:
            return rows
        self._unmarked += 1
        batch = kind == "batch"
        charged = self.ledger.charge(
            rows if self._in_order else self._accounts[rows],
            kind,
            self._batch if batch else self._upload,
            limit=self._limit,
            whole=whole,
            carried=self._carried,
            trains=batch and self._trains,
        )
        allowed = rows if charged.all() else rows[charged]
        if self._repeats is not None:
            self._repeats.note(rows, allowed, kind)
        return allowed

    def close(self) -> None:
        """Close the ledger."""
        self.ledger.close()

    def recognise(self, mark: bytes) -> None:
        """Check the last mark that the server received; empty if none.

        Raises:
            LedgerError: the ledger does not know it.
        """
        self.ledger.recognise(mark)
        # A client that only lost its connection needs no new mark.
        self._is_mark_due = bool(self._unmarked) or mark != self._last_mark

    def due_mark(self) -> bytes:
        """Enter a mark for the server and return it, if one is due; else return nothing.

        One is due after each welcome, and after every 32 uploads.
        """
        due = self._is_mark_due or self._unmarked >= _MARK_EVERY
        if self.ledger.path is None or not due:
            return b""
        self._is_mark_due, self._unmarked = False, 0
        self._last_mark = self.ledger.mark()
        return self._last_mark


@dataclass(frozen=True)
class ClientPrivacy:
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
    accounts: Numbers,
    local_steps: int = 1,
) -> ClientPrivacy:
    """Makes a client private; of mode `none`, accountable only: every upload costs infinitely much.

    Args:
        features: [rows, ...] of all rows that may ever be uploaded.
        accounts: [rows], which account of the ledger each row is.

    Raises:
        ConfigError: the model would carry records past the noise.
        BudgetExhausted: the features cannot be released any more.
    """
    noise, protection = Noise(), settings.protection
    if protection.guaranteed:
        require_separate_records(model, noise.gaussian((4, *features.shape[1:]), 1.0))
    budget = Budget(ledger, settings, accounts, local_steps)
    if not protection.noises_anything:
        return ClientPrivacy(features, model, None, None, budget)
    if protection.noises_features:
        encoder, rest = split_frozen(model)
        released = release_once(settings, features, ledger, accounts, noise, encoder)
        return ClientPrivacy(released, rest, None, None, budget)
    if not protection.trains_embedding:
        model.requires_grad_(False)
    body, rest = split_last(model) if settings.placement == "pre-activation" else (model, nn.Identity())
    hidden = HiddenNoise(body, settings, noise) if settings.layers else None
    updates = None
    if protection.noises_updates:
        trained = [parameter for parameter in body.parameters() if parameter.requires_grad]
        clip, deviation = settings.gradient_clip, settings.gradient_noise
        updates = NoisyUpdates(body, trained, clip, deviation, noise, hidden, features)
    return ClientPrivacy(features, body, Release(settings.clip, settings.noise, rest, noise), updates, budget)
