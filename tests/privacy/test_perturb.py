import math

import pytest
import torch

from tests.federation import run_of, vertical_data
from vafl.errors import ConfigError
from vafl.privacy.perturb import Perturbation, PrivacySettings


def test_long_embeddings_are_clipped_to_the_norm_and_short_ones_left():
    embeddings = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [-30.0, 40.0]])
    found = Perturbation(clip=1.0, noise=0.0)(embeddings)
    assert torch.allclose(found, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [-0.6, 0.8]]))


def test_the_gradient_passes_through_the_clip():
    embeddings = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(Perturbation(1.0, 0.0)(embeddings)[:, 0].sum(), embeddings)
    along = torch.tensor([1 / 5 - 9 / 125, -12 / 125])  # of 3 / |(3, 4)|
    assert torch.allclose(gradient, torch.stack([along, torch.tensor([1.0, 0]), torch.tensor([1.0, 0])]))


@pytest.mark.parametrize("noise", [0.1, 2.0])
def test_the_noise_has_the_deviation_asked_for_in_every_column(noise):
    drawn = Perturbation(0.0, noise)(torch.full((50_000, 3), 7.0)) - 7
    assert torch.allclose(drawn.std(0), torch.full((3,), noise), rtol=0.05)
    assert (drawn.mean(0).abs() < 0.05 * noise).all()
    assert abs(torch.corrcoef(drawn.T)[0, 1]) < 0.05


def test_clipping_comes_before_the_noise():
    found = Perturbation(1.0, 0.01)(torch.full((2000, 1), 100.0))
    assert found.mean().item() == pytest.approx(1, abs=0.01)
    assert (found > 1).any()


def test_noise_does_not_come_from_the_runs_seed_nor_disturb_it():
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        drawn.append(Perturbation(0.0, 1.0)(torch.zeros(4, 4)))
        assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(*drawn)


def test_two_runs_of_one_seed_upload_different_noise():
    uploads = []
    for _ in range(2):
        run = run_of(vertical_data(), privacy={"clip": 1.0, "noise": 0.5})
        (message,) = run.runtime.clients[0].wake()
        uploads.append(message.embeddings)
    assert not torch.equal(*uploads)


def test_nothing_is_perturbed_unless_asked():
    assert PrivacySettings().perturbation() is None
    assert PrivacySettings(clip=1.0).perturbation() is not None
    assert PrivacySettings(noise=1.0).perturbation() is not None


@pytest.mark.parametrize("name", ["clip", "noise"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_settings_that_cannot_be_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"privacy.{name} must be 0 or more. Found {value}"):
        PrivacySettings(**{name: value})
