import math

import pytest

from vafl.errors import ConfigError
from vafl.privacy.modes import MODES
from vafl.privacy.settings import PrivacySettings

TRAINED = {"clip": 1.0, "noise": 2.0, "gradient_clip": 3.0, "gradient_noise": 4.0, "mu_max": 5.0}


def test_nothing_is_private_unless_asked():
    assert PrivacySettings().kind == "none"


def test_a_client_with_noise_trains_under_differential_privacy_by_default():
    assert PrivacySettings(**TRAINED).kind == "dp_train"


@pytest.mark.parametrize(("neighbours", "factor"), [("zero_out", 1), ("replace", 2)])
def test_costs_are_squares_of_sensitivity_over_noise(neighbours, factor):
    settings = PrivacySettings(**TRAINED, neighbours=neighbours)
    assert settings.upload_cost == (factor * 1.0 / 2.0) ** 2
    assert settings.update_cost == (factor * 3.0 / 4.0) ** 2


def test_without_a_clip_nothing_bounds_the_cost():
    assert PrivacySettings(mode="embed_only", noise=1.0).upload_cost == math.inf


@pytest.mark.parametrize("name", ["clip", "noise", "gradient_clip", "gradient_noise"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_settings_that_cannot_be_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"VFL-5104.*privacy\.{name} .*{value}"):
        PrivacySettings(**{name: value})


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_delta_is_a_probability(delta):
    with pytest.raises(ConfigError, match=f"VFL-5101.*{delta}"):
        PrivacySettings(delta=delta)


def test_a_guarantee_needs_its_clip_and_noise():
    with pytest.raises(
        ConfigError,
        match=r"VFL-5102.*dp_train.*privacy\.clip, privacy\.gradient_clip, privacy\.gradient_noise",
    ):
        PrivacySettings(noise=1.0)
    with pytest.raises(ConfigError, match=r"VFL-5102.*frozen.*privacy\.noise"):
        PrivacySettings(mode="frozen", clip=1.0)


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("none", {"noise": 1.0}),
        ("release_once", {"clip": 1.0, "noise": 1.0, "gradient_noise": 1.0}),
        ("embed_only", {"noise": 1.0, "mu_max": 1.0}),
        ("embed_only", {"noise": 1.0, "mu_max": "unlimited"}),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(mode, more):
    with pytest.raises(ConfigError, match=rf"VFL-5107.*privacy\.mode {mode} .*privacy\."):
        PrivacySettings(mode=mode, **more)


@pytest.mark.parametrize("mode", ["release_once", "frozen", "dp_train"])
def test_a_mode_with_a_guarantee_needs_a_budget(mode):
    needed = {name: TRAINED[name] for name in MODES[mode].needs}
    with pytest.raises(ConfigError, match=rf"VFL-5105.*privacy.mode {mode}.*privacy.mu_max"):
        PrivacySettings(mode=mode, **needed).check_budget()
    assert PrivacySettings(mode=mode, mu_max=2.0, **needed).limit == 2.0
    assert PrivacySettings(mode=mode, mu_max="unlimited", **needed).limit == math.inf


@pytest.mark.parametrize("value", [0.0, -0.1, math.nan, math.inf, "none"])
def test_a_budget_is_above_zero_or_unlimited_by_name(value):
    with pytest.raises(ConfigError, match=r"VFL-5106.*unlimited"):
        PrivacySettings(**{**TRAINED, "mu_max": value})


def test_modes_without_a_budget_have_no_limit():
    assert PrivacySettings().limit == math.inf
    assert PrivacySettings(mode="embed_only", noise=1.0).limit == math.inf


def test_neighbours_replace_a_record_by_default():
    assert PrivacySettings(**TRAINED).upload_cost == (2 * 1.0 / 2.0) ** 2
