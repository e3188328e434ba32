import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from vafl.privacy.mechanism.noise import Noise


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


@pytest.mark.parametrize("deviation", [0.3, 2.0, 10.0, 4096.0])
def test_the_last_bits_of_a_noised_value_tell_nothing_of_it(deviation):
    """Every sum is a multiple of one step, and exact in float32, so all values give the same set of sums."""
    step = 2.0 ** math.floor(math.log2(deviation)) / 4096
    for value in (0.1, -0.7234, 1 / 3):
        found = Noise().added_to(np.full(10_000, value, np.float32), deviation).astype(np.float64) / step
        assert (found == np.rint(found)).all()
        assert np.abs(found).max() < 2**24


def test_noise_added_has_its_deviation_and_values_lose_little_and_never_grow(monkeypatch):
    values, noise = np.linspace(-1, 1, 100_001, dtype=np.float32), Noise()
    assert kstest((noise.added_to(values, 2.0) - values) / 2.0, "norm").pvalue > 1e-6
    assert (noise.added_to(values, 0.0) == values).all()
    monkeypatch.setattr(noise, "normals", lambda count, deviation: np.zeros(count))
    lost = np.abs(values) - np.abs(noise.added_to(values, 2.0))
    assert lost.min() == 0
    assert 0 < lost.max() < 2.0 / 4096


def test_normal_noise_after_uniform_noise_is_normal():
    """Both use the same buffer."""
    noise = Noise()
    noise.gaussian((10,), 1.0)
    noise.uniform((10,), 1.0)
    assert kstest(noise.gaussian((20_000,), 1.0).double().numpy(), "norm").pvalue > 1e-6


@pytest.mark.parametrize("byte", [b"\0", b"\x7f", b"\x80", b"\xff"])
def test_no_word_of_the_cipher_makes_noise_that_is_not_finite(monkeypatch, byte):
    noise = Noise()
    stream = SimpleNamespace(update_into=lambda plain, out: out.__setitem__(slice(None), byte * len(out)))
    monkeypatch.setattr(noise, "_stream", stream)
    drawn = noise.gaussian((3,), 1.0)
    assert drawn.isfinite().all()
    assert (drawn != 0).all()
