import math

import pytest
import torch
from torch import nn

from vafl.privacy.mechanism.release import clip_rows
from vafl.privacy.mechanism.secant import FixedNoise, secant
from vafl.privacy.settings import PrivacySettings


def test_a_quadratic_has_its_largest_curvature_in_modulus():
    matrix = torch.diag(torch.tensor([1.0, -7.0, 3.0], dtype=torch.float64))
    at = torch.zeros(3, dtype=torch.float64)
    assert secant(lambda theta: matrix @ theta, at, 0.1, rounds=40) == pytest.approx(7.0, rel=1e-6)


def test_a_flat_function_has_none():
    assert secant(torch.zeros_like, torch.zeros(3), 0.1) == 0.0


def test_a_secant_sees_the_kink_that_autograds_hessian_misses():
    """E relu(w + Z), Z normal with c = 0.5: the second derivative at 0 is phi(0)/c = 0.798."""
    noise = 0.5 * torch.randn(400_000, generator=torch.Generator().manual_seed(0))

    def mean(weight):
        return (weight + noise).relu().mean()

    def gradient(theta):
        weight = theta.clone().requires_grad_()
        return torch.autograd.grad(mean(weight), weight)[0]

    at = torch.zeros(1)
    assert torch.autograd.functional.hessian(mean, at).abs().max() == 0
    assert secant(gradient, at, 0.02) == pytest.approx(math.sqrt(2 / math.pi), rel=0.03)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Tanh())


FEATURES = torch.linspace(-1, 1, 30).view(10, 3)


@pytest.mark.parametrize("placement", ["pre-activation", "output"])
def test_noise_stays_the_same_from_call_to_call(placement):
    settings = PrivacySettings(mode="embed_only", clip=1.0, noise=0.5, layers=(0.3,), placement=placement)
    fixed, other = (FixedNoise(model(), settings, FEATURES, draws=3) for _ in range(2))
    assert fixed().shape == (30, 2)
    assert torch.equal(fixed(), fixed())
    assert not torch.equal(fixed(), other())
    assert not torch.equal(fixed()[:10], fixed()[10:20])


def test_the_last_pre_activation_is_clipped_then_noised():
    own = model()
    with torch.no_grad():
        clipped = clip_rows(own[:3](FEATURES), 0.2)
        fixed = FixedNoise(own, PrivacySettings(mode="embed_only", clip=0.2, noise=1e-12), FEATURES, draws=1)
        assert torch.allclose(fixed(), clipped.tanh(), atol=1e-6)


@pytest.mark.parametrize(
    "settings", [PrivacySettings(), PrivacySettings(mode="release_once", clip=1.0, noise=1.0, mu_max=2.0)]
)
def test_a_model_without_noise_is_itself(settings):
    own = model()
    assert torch.equal(FixedNoise(own, settings, FEATURES, draws=1)(), own(FEATURES))
