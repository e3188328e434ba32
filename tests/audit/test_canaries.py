"""The audit itself: honest clients pass with a bound close to the claim, others are found out."""

from dataclasses import replace
from statistics import median

import pytest

from vafl.audit.canaries import audit_mechanism, audit_model_channel, lower_bound
from vafl.privacy.settings import PrivacySettings

# mu = 1 each, in four rounds
FROZEN = PrivacySettings(mode="frozen", clip=1.0, noise=2.0)
TRAINED = PrivacySettings(clip=1.0, noise=8**0.5, gradient_clip=1.0, gradient_noise=8**0.5)
ONCE = PrivacySettings(mode="release_once", clip=1.0, noise=1.0)
EMBED_ONLY = PrivacySettings(mode="embed_only", clip=1.0, noise=2.0)


def replaced(settings: PrivacySettings) -> PrivacySettings:
    """The other kind of neighbours, at the same mu."""
    return replace(
        settings,
        neighbours="replace",
        noise=2 * settings.noise,
        gradient_noise=2 * settings.gradient_noise,
    )


def halved(settings: PrivacySettings) -> PrivacySettings:
    return replace(settings, noise=settings.noise / 2, gradient_noise=settings.gradient_noise / 2)


def bounds(claimed, used, times=5):
    findings = [audit_mechanism(claimed, used, canaries=2000) for _ in range(times)]
    assert findings[0].claimed == pytest.approx(1.0)
    return median(finding.found for finding in findings)


@pytest.mark.parametrize("settings", [FROZEN, TRAINED, ONCE, replaced(FROZEN), replaced(TRAINED)])
def test_an_honest_client_passes_and_the_bound_is_close(settings):
    assert 0.75 < bounds(settings, settings) < 1.05  # a single bound is beyond 1 one time in twenty


@pytest.mark.parametrize("settings", [FROZEN, TRAINED, ONCE])
def test_half_the_noise_is_found_out(settings):
    assert bounds(settings, halved(settings), 3) > 1.4


def test_too_little_noise_on_gradients_alone_is_found_out():
    used = replace(TRAINED, gradient_noise=TRAINED.gradient_noise / 4)
    assert bounds(TRAINED, used, 5) > 1.05


def test_the_model_carries_records_past_the_noise_of_embed_only():
    finding = audit_model_channel(EMBED_ONLY, EMBED_ONLY, canaries=500)
    assert not finding.passed
    assert finding.found > 1.8


def test_noised_updates_close_the_model_channel():
    finding = audit_model_channel(TRAINED, TRAINED, canaries=500)
    assert finding.passed
    assert finding.found > 0.1  # the audit sees that channel; it is the noise that closes it


def test_the_bound_of_all_none_and_half_right():
    assert lower_bound(0, 1000) == 0
    assert lower_bound(500, 1000) == 0
    assert 5 < lower_bound(1000, 1000) < 6
