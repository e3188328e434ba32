"""The log of a private client whose server asks for the same records again."""

import logging

import numpy as np
import pytest

from tests.privacy.ledger.people import opened
from vafl.privacy.ledger.repeats import Repeats
from vafl.privacy.mechanism.client_privacy import Budget
from vafl.privacy.settings import PrivacySettings

SETTINGS = PrivacySettings(mode="frozen", clip=1.0, noise=4.0, mu_max=1.0)  # mu^2 = 1/4 per upload
ONE = np.array([1])


class Asked:
    """A private client's budget and its clock."""

    def __init__(self, path):
        self.now = 0.0
        self.ledger, accounts = opened(path, settings=SETTINGS)
        self.budget = Budget(self.ledger, SETTINGS, accounts, 1)
        self.budget._repeats = Repeats(self.ledger, accounts, SETTINGS.limit, lambda: self.now)

    def __call__(self, kind, rows=ONE):
        return self.budget.spend(np.asarray(rows, dtype=np.int64), kind)


@pytest.fixture
def asked(tmp_path, caplog):
    caplog.set_level(logging.INFO, "vafl.client")
    return Asked(tmp_path / "own.ledger")


def lines(caplog):
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return found


def test_a_first_request_is_no_news(asked, caplog):
    asked("batch")
    asked("refresh")
    asked("evaluation", [0])
    assert lines(caplog) == []


def test_evaluations_between_training_are_logged_now_and_then(asked, caplog):
    for _ in range(2):
        asked("evaluation")
        asked("batch", [0])
    ((level, said),) = lines(caplog)
    assert level == "INFO"
    assert "1 records (evaluation)" in said
    assert "2 times; mu 0.7071" in said
    assert "budget is 1" in said
    asked("evaluation")
    asked("batch", [2])
    assert lines(caplog) == [], "not again at once"
    asked.now += 60
    asked("evaluation", [1, 4])
    ((_, said),) = lines(caplog)
    assert "4 times; mu 1 " in said


@pytest.mark.parametrize("kind", ["request", "evaluation", "prediction"])
def test_records_asked_again_without_training_are_a_warning(asked, caplog, kind):
    asked(kind, [0, 1])
    asked(kind, [1, 2])
    ((level, said),) = lines(caplog)
    assert level == "WARNING"
    assert f"again for 1 records ({kind}) although the model has not changed" in said
    assert "2 times" in said


def test_a_budget_that_is_spent_is_a_warning(asked, caplog):
    for _ in range(4):
        assert len(asked("evaluation")) == 1
        asked("batch", [])
    lines(caplog)
    assert len(asked("evaluation")) == 0
    ((level, said),) = lines(caplog)
    assert level == "WARNING"
    assert "1 of the 1 records" in said
    assert "the budget of mu 1 is spent" in said


def test_uploads_of_earlier_runs_count(tmp_path, caplog):
    caplog.set_level(logging.INFO, "vafl.client")
    first = Asked(tmp_path / "own.ledger")
    first("evaluation")
    first.ledger.close()
    Asked(tmp_path / "own.ledger")("evaluation")
    ((level, said),) = lines(caplog)
    assert (level, "asked for 2 times" in said) == ("INFO", True)
