"""Make one client private: assemble its clipping, noise and budget from the privacy settings."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from vafl.arrays import Integers, RowIds
from vafl.privacy.ledger.accounts import Kind
from vafl.privacy.ledger.ledger import Ledger
from vafl.privacy.ledger.repeats import Repeats
from vafl.privacy.mechanism.layers import HiddenNoise, require_separate_records
from vafl.privacy.mechanism.noise import Noise
from vafl.privacy.mechanism.records import NoisyUpdates
from vafl.privacy.mechanism.release import Release, split_frozen, split_last
from vafl.privacy.mechanism.released import release_once
from vafl.privacy.settings import PrivacySettings

_MARK_EVERY = 32  # uploads between two marks: a rollback of the ledger can hide at most these from the server


class Budget:
    """Decide which rows a client may still upload, and charge the ledger for them.

    Args:
        ledger: the client's ledger.
        settings: the costs and the limit.
        accounts: [rows], each row's account in the ledger.
        local_steps: the number of local updates per minibatch.
    """

    def __init__(
        self, ledger: Ledger, settings: PrivacySettings, accounts: Integers, local_steps: int
    ) -> None:
        self.ledger = ledger
        self._accounts, self._limit = accounts, settings.limit
        self._in_order = bool((accounts == np.arange(len(accounts))).all())
        self._free = settings.protection.noises_features  # later uploads are post-processing
        # Only here does the cost of others' uploads depend on when a record was first trained on.
        self._trains = settings.protection.carries_records
        self._carried = settings.carried_cost
        self._upload = settings.upload_cost
        self._batch = settings.batch_cost(local_steps)
        self._unmarked = 0  # uploads charged since the last mark
        self._last_mark: bytes | None = None
        self._is_mark_due = False
        # A ledger in memory belongs to a simulation, whose server is not a possible attacker.
        self._repeats = Repeats(ledger, accounts, self._limit) if ledger.path is not None else None

    def spend(self, rows: RowIds, kind: Kind, *, whole: bool = False) -> RowIds:
        """Charge an upload durably, and return the rows that may be uploaded; with `whole`, all or none."""
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
        """Check the last mark that the server received from this client; empty if it received none.

        Raises:
            LedgerError: the ledger does not know the mark.
        """
        self.ledger.recognise(mark)
        # A client that only lost its connection, and has uploaded nothing since, needs no new mark.
        self._is_mark_due = bool(self._unmarked) or mark != self._last_mark

    def due_mark(self) -> bytes:
        """Store a new mark and return it for the server if one is due; else return b"".

        A mark is due after each welcome and after every 32 uploads.
        """
        due = self._is_mark_due or self._unmarked >= _MARK_EVERY
        if self.ledger.path is None or not due:
            return b""
        self._is_mark_due, self._unmarked = False, 0
        self._last_mark = self.ledger.mark()
        return self._last_mark


@dataclass(frozen=True)
class ClientPrivacy:
    """The parts of a private client.

    Attributes:
        features: the features that the client trains on and embeds.
        model: the embedding model, up to the layer whose output is noised.
        release: clips and noises the model's output and applies the rest of the model; None if the model's
            output may be uploaded as it is.
        updates: embeds a minibatch and computes noised gradients; None for plain gradients.
        budget: charges the uploads.
    """

    features: Tensor
    model: nn.Module
    release: Release | None
    updates: NoisyUpdates | None
    budget: Budget

    def whole_model(self) -> nn.Module:
        """Return a model that maps features to the embeddings that are uploaded."""
        return self.model if self.release is None else nn.Sequential(self.model, self.release)


def protect(
    settings: PrivacySettings,
    model: nn.Module,
    features: Tensor,
    ledger: Ledger,
    accounts: Integers,
    local_steps: int = 1,
) -> ClientPrivacy:
    """Make a client private. In mode `none` the ledger still counts uploads, each with an infinite cost.

    Args:
        settings: the privacy settings.
        model: the client's embedding model. Mode `frozen` freezes it.
        features: [rows, ...] of all rows that may ever be uploaded.
        ledger: the client's ledger.
        accounts: [rows], each row's account in the ledger.
        local_steps: the number of local updates per minibatch.

    Raises:
        ConfigError: there is no budget, or the model mixes records, which would carry them past the noise.
        BudgetExhausted: the budget does not allow releasing the features.
    """
    settings.check_budget()
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
