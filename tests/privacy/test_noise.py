import math

import pytest
import torch
from scipy.stats import kstest

from vafl.privacy.noise import Noise


@pytest.mark.parametrize("deviation", [0.1, 2.0])
def test_gaussian_noise_is_gaussian(deviation):
    drawn = Noise().gaussian((50_000, 2), deviation)
    assert drawn.dtype == torch.float32
    assert kstest(drawn.flatten().double().numpy() / deviation, "norm").pvalue > 1e-6
    assert abs(torch.corrcoef(drawn.T)[0, 1]) < 0.05


def test_uniform_noise_fills_its_interval():
    drawn = Noise().uniform((100_000,), 0.5)
    ends = math.sqrt(3) * 0.5
    assert kstest(drawn.double().numpy(), "uniform", (-ends, 2 * ends)).pvalue > 1e-6
    assert drawn.std().item() == pytest.approx(0.5, rel=0.02)


def test_large_and_empty_draws():
    assert Noise().gaussian((3, 1 << 19), 1.0).shape == (3, 1 << 19)
    assert Noise().gaussian((0, 4), 1.0).shape == (0, 4)


def test_noise_does_not_come_from_the_runs_seed_nor_disturb_it():
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        drawn.append(Noise().gaussian((4, 4), 1.0))
        assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(*drawn)


def test_one_generator_never_repeats_itself():
    noise = Noise()
    assert not torch.equal(noise.gaussian((4,), 1.0), noise.gaussian((4,), 1.0))
