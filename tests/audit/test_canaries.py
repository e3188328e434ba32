"""The audit: honest clients pass with a bound close to the claim, others are detected."""

from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from vafl.audit.canaries import (
    Finding,
    audit_extreme_slopes,
    audit_mechanism,
    audit_model_channel,
    confirmed,
    lower_bound,
)
from vafl.config import Config
from vafl.privacy.settings import PrivacySettings
from vafl.protocol.schedule import ScheduleSettings
from vafl.protocol.settings import RuleSettings

# mu = 1 each, in four rounds
ZEROED = {"neighbours": "zero_out", "mu_max": "unlimited"}
FROZEN = PrivacySettings(mode="frozen", clip=1.0, noise=2.0, **ZEROED)
TRAINED = PrivacySettings(clip=1.0, noise=8**0.5, gradient_clip=1.0, gradient_noise=8**0.5, **ZEROED)
ONCE = PrivacySettings(mode="release_once", clip=1.0, noise=1.0, **ZEROED)
EMBED_ONLY = PrivacySettings(mode="embed_only", clip=1.0, noise=2.0, neighbours="zero_out")


def replaced(settings: PrivacySettings) -> PrivacySettings:
    """Return the settings with the other kind of neighbours, at the same mu."""
    return replace(
        settings,
        neighbours="replace",
        noise=2 * settings.noise,
        gradient_noise=2 * settings.gradient_noise,
    )


def halved(settings: PrivacySettings) -> PrivacySettings:
    return replace(settings, noise=settings.noise / 2, gradient_noise=settings.gradient_noise / 2)


def claiming(settings: PrivacySettings) -> Config:
    return Config(privacy=settings, schedule=ScheduleSettings(refresh="none"))


def bounds(claimed, used, times=5):
    findings = [audit_mechanism(claiming(claimed), used, canaries=2000) for _ in range(times)]
    assert findings[0].claimed == pytest.approx(1.0)
    return median(finding.found for finding in findings)


@pytest.mark.parametrize("settings", [FROZEN, TRAINED, ONCE, replaced(FROZEN), replaced(TRAINED)])
def test_an_honest_client_passes_and_the_bound_is_close(settings):
    assert 0.75 < bounds(settings, settings) < 1.05  # a single bound exceeds 1 in one of twenty audits


@pytest.mark.parametrize("settings", [FROZEN, TRAINED, ONCE])
def test_half_the_noise_is_found_out(settings):
    assert bounds(settings, halved(settings), 3) > 1.4


def test_too_little_noise_on_gradients_alone_is_found_out():
    used = replace(TRAINED, gradient_noise=TRAINED.gradient_noise / 4)
    assert bounds(TRAINED, used, 5) > 1.05


@pytest.mark.parametrize("kind", ["epochs", "iid"])
@pytest.mark.parametrize("refresh", ["all", "random:300", "lookahead"])
def test_refreshes_and_local_steps_are_watched_too(kind, refresh):
    config = Config(
        privacy=TRAINED,
        schedule=ScheduleSettings(kind=kind, refresh=refresh),
        rule=RuleSettings(local_steps=2),
    )
    honest = [audit_mechanism(config, TRAINED) for _ in range(5)]
    assert 0.7 < median(one.found / one.claimed for one in honest) < 1.05
    assert confirmed(lambda: audit_mechanism(config, halved(TRAINED))).verdict == "broken"


def test_a_large_clip_is_filled():
    large = PrivacySettings(mode="frozen", clip=1e5, noise=2e5, **ZEROED)
    assert audit_mechanism(claiming(large), halved(large)).verdict == "broken"


def test_the_model_carries_records_past_the_noise_of_embed_only():
    finding = audit_model_channel(claiming(EMBED_ONLY), EMBED_ONLY, canaries=500)
    assert finding.verdict == "broken"
    assert finding.found > 1.8


def test_noised_updates_close_the_model_channel():
    findings = [audit_model_channel(claiming(TRAINED), TRAINED, canaries=500) for _ in range(5)]
    assert findings[0].claimed == pytest.approx(1.0), "by the updates alone"
    assert 0.5 < median(finding.found for finding in findings) < 1


def test_too_little_noise_on_updates_opens_the_model_channel():
    assert audit_model_channel(claiming(TRAINED), halved(TRAINED)).verdict == "broken"


def scaled_in_float32(rows, factors):
    """Clip as an earlier version did, with a float32 factor."""
    return (rows * factors.astype(np.float32)[:, None]).astype(np.float64)


def extreme(settings, used=None):
    """Return the median of three findings: an honest client fails one audit in a hundred."""
    findings = [audit_extreme_slopes(claiming(settings), used or settings) for _ in range(3)]
    assert findings[0].claimed == pytest.approx(1.0), "by the updates alone"
    return sorted(findings, key=lambda finding: finding.found)[1]


@pytest.mark.parametrize("settings", [TRAINED, replaced(TRAINED)])
def test_extreme_slopes_break_a_clip_in_float32_and_not_one_in_float64(monkeypatch, settings):
    assert extreme(settings).verdict == "holds"
    monkeypatch.setattr("vafl.privacy.mechanism.records.scaled", scaled_in_float32)
    assert extreme(settings).verdict == "broken"
    assert extreme(settings).found > 1.2


def test_a_small_clip_is_tried_with_huge_features():
    small = replace(TRAINED, gradient_clip=1e-6, gradient_noise=1e-6 * TRAINED.gradient_noise)
    assert extreme(small).verdict == "holds"
    assert extreme(small, halved(small)).verdict == "broken"


def test_an_audit_that_could_not_fail_cannot_tell():
    """Even 1000 correct guesses of 1000 prove only a mu of 5.5, so they cannot refute a claim of 6."""
    claimed = PrivacySettings(mode="release_once", clip=6.0, noise=1.0, **ZEROED)
    used = replace(claimed, noise=0.1)
    finding = audit_mechanism(claiming(claimed), used)
    assert (finding.verdict, finding.power) == ("cannot tell", 0.0)
    more = audit_mechanism(claiming(claimed), used, canaries=finding.canaries_needed)
    assert more.verdict == "broken"


def test_the_power_is_how_often_half_the_noise_is_noticed():
    claimed = PrivacySettings(mode="release_once", clip=1.0, noise=6.0, **ZEROED)
    findings = [
        confirmed(lambda: audit_mechanism(claiming(claimed), halved(claimed), 1000)) for _ in range(200)
    ]
    share = sum(finding.verdict == "broken" for finding in findings) / 200
    assert share == pytest.approx(findings[0].power, abs=0.15)
    assert 0.2 < findings[0].power < 0.5
    assert {finding.verdict for finding in findings} == {"broken", "cannot tell"}


def test_some_claims_cannot_be_tested_by_any_number_of_canaries():
    assert Finding("channel", 1.0, 0.5, 0.6, accuracy_at_half=0.6, canaries=1000).canaries_needed == 0


def test_the_bound_of_all_none_and_half_right():
    assert lower_bound(0, 1000) == 0
    assert lower_bound(500, 1000) == 0
    assert 5 < lower_bound(1000, 1000) < 6
