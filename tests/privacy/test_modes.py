from typing import get_args

from vafl.privacy.modes import DEFAULT_PRIVATE_MODE, MODES, Mode, PrivateMode


def _names(flag):
    return {mode.name for mode in MODES.values() if getattr(mode, flag)}


def test_every_mode_has_one_row_under_its_name():
    assert tuple(MODES) == get_args(Mode)
    assert all(name == mode.name for name, mode in MODES.items())


def test_private_modes_are_those_that_add_noise():
    assert _names("noises_anything") == set(get_args(PrivateMode))


def test_a_guarantee_needs_clip_and_noise_and_allows_a_budget():
    for mode in MODES.values():
        if mode.guaranteed:
            assert {"clip", "noise"} <= set(mode.needs)
            assert "mu_max" not in mode.forbids


def test_no_mode_forbids_what_it_needs():
    assert not any(set(mode.needs) & set(mode.forbids) for mode in MODES.values())


def test_only_a_model_trained_without_noise_carries_records_past_the_noise_on_uploads():
    assert _names("exposes_model") == {"dp_train", "embed_only"}
    assert _names("carries_records") == {"embed_only"}
    assert not any(mode.guaranteed and mode.carries_records for mode in MODES.values())


def test_the_default_private_mode_has_a_guarantee():
    assert MODES[DEFAULT_PRIVATE_MODE].guaranteed
