from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests.privacy.ledger.people import FIVE, opened
from vafl.errors import BudgetExhausted, RunFolderError
from vafl.privacy.mechanism.noise import Noise
from vafl.privacy.mechanism.released import release_once
from vafl.privacy.settings import PrivacySettings

ZEROED = {"neighbours": "zero_out", "mu_max": "unlimited"}
ONCE = PrivacySettings(mode="release_once", clip=1.0, noise=2.0, **ZEROED)  # mu^2: 1/4
PLAIN = nn.Identity()


def release(path, features, people=FIVE, settings=ONCE, encoder=PLAIN):
    """Return what one run releases, and the mu^2 of its people then."""
    ledger, accounts = opened(path, people, settings=settings)
    try:
        released = release_once(settings, features, ledger, accounts, Noise(), encoder)
        return released, ledger.spent[accounts].tolist()
    finally:
        ledger.close()


def test_what_was_released_is_used_again_by_the_next_run_and_costs_nothing(tmp_path):
    features, path = torch.randn(5, 3), tmp_path / "own.ledger"
    first, spent = release(path, features)
    assert spent == [0.25] * 5
    assert not torch.equal(first, features)
    again, spent = release(path, features)
    assert torch.equal(again, first)
    assert spent == [0.25] * 5
    other, spent = release(path, features, settings=replace(ONCE, noise=1.0))
    assert not torch.equal(other, first)
    assert spent == [1.25] * 5
    assert torch.equal(release(path, features)[0], first), "one release does not undo another"
    assert {oct(entry.stat().st_mode)[-3:] for entry in tmp_path.iterdir()} == {"600"}


def test_a_release_follows_its_person_and_only_new_or_changed_ones_are_charged(tmp_path):
    features, path = torch.randn(5, 3), tmp_path / "own.ledger"
    first, _ = release(path, features)
    now = torch.stack([features[4], features[1] + 1, torch.randn(3), features[0], torch.zeros(3)])
    second, spent = release(path, now, ("eve", "bob", "fay", "ann", None))
    assert torch.equal(second[[0, 3]], first[[4, 0]])
    assert not torch.equal(second[1], first[1])
    assert spent[:4] == [0.25, 0.5, 0.25, 0.25]
    assert torch.equal(release(path, now[:4], ("eve", "bob", "fay", "ann"))[0], second[:4])


def test_equal_features_of_two_people_are_two_releases(tmp_path):
    features = torch.ones(5, 3)
    released, _ = release(tmp_path / "own.ledger", features)
    assert len(np.unique(released.numpy(), axis=0)) == 5


def test_what_a_frozen_encoder_makes_of_the_features_is_released_and_another_encoder_s_anew(tmp_path):
    exact = replace(ONCE, clip=100.0, noise=1e-6)
    features, encoder = torch.randn(5, 3), nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    other = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    for own, releases in ((encoder, 1), (encoder, 1), (other, 2), (encoder, 2)):
        released, spent = release(tmp_path / "own.ledger", features, settings=exact, encoder=own)
        torch.testing.assert_close(released, own(features).detach(), atol=1e-4, rtol=1e-4)
        assert spent == pytest.approx([releases * exact.upload_cost] * 5)


def test_a_release_beyond_the_budget_is_refused_before_anything_is_written(tmp_path):
    capped = replace(ONCE, mu_max=0.4)
    with pytest.raises(BudgetExhausted, match=r"VFL-5051.*0\.5.*0"):
        release(tmp_path / "own.ledger", torch.randn(5, 3), settings=capped)
    assert {entry.name for entry in tmp_path.iterdir()} == {"own.ledger", "own.ledger.head"}


def test_a_release_counts_for_later_runs_by_their_own_neighbours(tmp_path):
    """A mu of 1/2 against zeros is a mu of 1 between two values."""
    features, path = torch.randn(5, 3), tmp_path / "own.ledger"
    first, _ = release(path, features)
    with pytest.raises(BudgetExhausted, match=r"VFL-5052.*1"):
        release(path, features, settings=replace(ONCE, neighbours="replace", mu_max=0.9))
    again, spent = release(path, features, settings=replace(ONCE, neighbours="replace", mu_max=1.0))
    assert torch.equal(again, first)
    assert spent == [1.0] * 5


def test_damaged_releases_are_not_silently_released_again(tmp_path):
    features, path = torch.randn(5, 3), tmp_path / "own.ledger"
    release(path, features)
    (kept,) = tmp_path.glob("*.released")
    kept.write_bytes(b"junk")
    with pytest.raises(RunFolderError, match="VFL-5081"):
        release(path, features)
