import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.errors import ConfigError
from vafl.privacy.analysis import accountant
from vafl.privacy.analysis.calibration import Deviations, Mechanism, PaperCalibration, calibrate, guarantee
from vafl.privacy.analysis.exposure import Exposure

MODES = ("release_once", "frozen", "dp_train", "embed_only")
USED = Exposure(batches=20, refreshes=5, requests=3, updates=40, evaluations=9, vectors=12_000)

exposures = st.builds(
    Exposure,
    batches=st.integers(1, 1000),
    refreshes=st.integers(0, 1000),
    requests=st.integers(0, 1000),
    updates=st.integers(1, 1000),
    evaluations=st.integers(0, 5000),
    vectors=st.integers(3000, 10**7),
)


@given(
    exposure=exposures,
    mode=st.sampled_from(MODES),
    neighbours=st.sampled_from(["zero_out", "replace"]),
    mu=st.floats(0.01, 100),
    share=st.floats(0.05, 0.95),
    clip=st.floats(0.1, 10),
)
def test_calibrated_noise_keeps_to_the_budget(exposure, mode, neighbours, mu, share, clip):
    mechanism = Mechanism(mode, clip, 2.0, neighbours)
    found = guarantee(mechanism, exposure, calibrate(mechanism, exposure, mu, share))
    assert found <= mu * (1 + 1e-9)
    if exposure.evaluations <= exposure.uploads * min(share, 1 - share):
        assert found == pytest.approx(mu)  # no noise is wasted, unless held-out records need more


def test_the_reference_value():
    twenty = Exposure(batches=20, refreshes=0, requests=0, updates=20, evaluations=0, vectors=20_000)
    mu = guarantee(Mechanism("frozen", 1.0), twenty, Deviations(10.0))
    assert accountant.epsilon(mu, 1e-5) == pytest.approx(3.8486, abs=5e-5)


def test_each_mode_by_hand():
    deviations = Deviations(noise=4.0, gradient_noise=5.0)

    def mu(mode, neighbours="zero_out"):
        return guarantee(Mechanism(mode, 2.0, 3.0, neighbours), USED, deviations)

    assert mu("release_once") == pytest.approx(2 / 4)
    assert mu("frozen") == pytest.approx(math.sqrt(28) * 2 / 4)
    assert mu("dp_train") == pytest.approx(math.sqrt(28 * (2 / 4) ** 2 + 40 * (3 / 5) ** 2))
    assert mu("embed_only") == pytest.approx(math.sqrt(28 * 2**2 + 11_972 * 4**2) / 4)
    assert mu("dp_train", "replace") == pytest.approx(2 * mu("dp_train"))
    assert mu("embed_only", "replace") == pytest.approx(math.sqrt(12_000) * 4 / 4)


def test_a_record_that_is_only_evaluated_counts_too():
    often = Exposure(batches=1, refreshes=0, requests=0, updates=1, evaluations=400, vectors=10_000)
    assert guarantee(Mechanism("frozen", 0.5), often, Deviations(10.0)) == pytest.approx(2.0)
    assert guarantee(Mechanism("dp_train", 0.5, 0.5), often, Deviations(10.0, 10.0)) == pytest.approx(2.0)


def test_the_share_moves_noise_between_uploads_and_updates():
    mechanism = Mechanism("dp_train", 1.0, 1.0)
    half, most = calibrate(mechanism, USED, 1.0), calibrate(mechanism, USED, 1.0, share=0.9)
    assert most.noise < half.noise
    assert most.gradient_noise > half.gradient_noise


@given(
    sensitivity=st.floats(0.1, 10),
    batch=st.integers(1, 600),
    steps=st.integers(1, 10**5),
    samples=st.booleans(),
    mu=st.floats(0.05, 5),
)
def test_the_papers_formula_reads_both_ways(sensitivity, batch, steps, samples, mu):
    paper = PaperCalibration(sensitivity, batch, 60_000, steps, samples)
    assert paper.first_order_mu(paper.first_order(mu)) == pytest.approx(mu)
    assert paper.central_limit_mu(paper.central_limit(mu)) == pytest.approx(mu)


def test_the_papers_two_forms_meet_where_noise_is_large():
    paper = PaperCalibration(1.0, 600, 60_000, 10**6)
    assert paper.central_limit(0.1) == pytest.approx(paper.first_order(0.1), rel=1e-4)
    assert PaperCalibration(1.0, 600, 60_000, 1.0).central_limit_mu(1e-3) == math.inf


def test_counting_samples_takes_the_root_of_the_batch_more_noise():
    steps, samples = (PaperCalibration(1.0, 600, 60_000, 2000, kind) for kind in (False, True))
    assert samples.first_order(1.0) == pytest.approx(steps.first_order(1.0) * math.sqrt(600))


def test_revealed_ids_cost_what_the_paper_does_not_count():
    """privacy.md, section 2: N = 60000, batch 600, 2000 steps, c = Delta."""
    balanced = Exposure(batches=20, refreshes=0, requests=0, updates=20, evaluations=0, vectors=1_200_000)
    honest = guarantee(Mechanism("frozen", 1.0, neighbours="zero_out"), balanced, Deviations(1.0))
    assert honest == pytest.approx(4.47, abs=0.01)
    assert accountant.epsilon(honest, 1e-5) == pytest.approx(28.4, abs=0.05)
    assert PaperCalibration(1.0, 600, 60_000, 2000).central_limit_mu(1.0) < honest / 5


@pytest.mark.parametrize("share", [0.0, 1.0, math.nan])
def test_a_share_leaves_something_for_both(share):
    with pytest.raises(ConfigError, match="VFL-5011"):
        calibrate(Mechanism("dp_train", 1.0, 1.0), USED, 1.0, share)


def test_what_bounds_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"VFL-5012.*clip.*0\.0"):
        Mechanism("frozen", 0.0)
    with pytest.raises(ConfigError, match=r"VFL-5012.*gradient_clip"):
        Mechanism("dp_train", 1.0)
    with pytest.raises(ConfigError, match=r"VFL-5012.*mu"):
        calibrate(Mechanism("frozen", 1.0), USED, 0.0)
    with pytest.raises(ConfigError, match=r"VFL-5012.*gradient_noise"):
        guarantee(Mechanism("dp_train", 1.0, 1.0), USED, Deviations(1.0))
