"""The default estimator on a mixed table, compared with `vafl run` on the same table as a CSV."""

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import r2_score, roc_auc_score

from vafl import VerticalClassifier, VerticalRegressor
from vafl.config import from_document
from vafl.run.assembly import build

pytestmark = pytest.mark.no_cover
ROWS = 2000
PARTIES = {"bank": ["income", "city", "opened"], "shop": ["spent", "kind", "member"]}


@pytest.fixture(scope="module")
def people():
    """Return a table with heavy tails, text, dates and gaps. Both targets depend on both parties' columns."""
    random = np.random.default_rng(0)
    income = np.exp(random.normal(size=ROWS))
    spent = np.where(random.random(ROWS) < 0.6, 0, np.exp(2 * random.normal(size=ROWS)))
    city, kind = random.integers(0, 12, ROWS), random.integers(0, 4, ROWS)
    score = 1.5 * np.log(income) + (city % 3 - 1) + (spent > 1) * (kind % 2 * 2 - 1) * 1.5
    days = random.integers(0, 900, ROWS)
    gaps = random.random((2, ROWS)) < 0.1
    return pl.DataFrame(
        {
            "income": [None if gap else x for gap, x in zip(gaps[0], income.round(4).tolist(), strict=True)],
            "city": [f"city {number}" for number in city],
            "opened": np.datetime64("2021-01-01") + days,
            "spent": spent.round(3),
            "kind": [None if gap else "abcd"[number] for gap, number in zip(gaps[1], kind, strict=True)],
            "member": random.random(ROWS) < 0.5,
            "bought": np.where(random.random(ROWS) < 1 / (1 + np.exp(-2 * score)), "yes", "no"),
            "worth": 1000 + 300 * (score + random.normal(size=ROWS) / 2),
        }
    )


def csv_run(people, folder, label, task):
    """Run `vafl run` on the table; return its test metric, its training rows and its test rows."""
    other = {"bought": "worth", "worth": "bought"}[label]
    people.drop(other).write_csv(folder / "people.csv")
    data = {"name": "csv", "path": str(folder / "people.csv"), "label": label, "task": task}
    run = build(from_document({"data": data, "partition": {"groups": PARTIES}}))
    run.train()
    figure = run.evaluator.test()[run.task.metrics.headline.name]
    numbers = run.data.record_numbers
    return figure, people[numbers[: run.data.test.start]], people[numbers[run.data.test]]


def test_the_default_classifier_is_as_good_as_a_run_on_the_same_csv(people, tmp_path):
    figure, known, new = csv_run(people, tmp_path, "bought", "classification")
    model = VerticalClassifier(parties=PARTIES, random_state=0).fit(known, known["bought"])
    auc = roc_auc_score(new["bought"] == "yes", model.predict_proba(new)[:, 1])
    assert auc > 0.85, "0.5 is chance"
    assert auc == pytest.approx(figure, abs=0.03)
    assert model.best_ is not None


def test_the_default_regressor_is_as_good_as_a_run_on_the_same_csv(people, tmp_path):
    figure, known, new = csv_run(people, tmp_path, "worth", "regression")
    model = VerticalRegressor(parties=PARTIES, random_state=0).fit(known, known["worth"])
    r2 = r2_score(new["worth"], model.predict(new))
    assert r2 > 0.7, "0 is the mean"
    assert r2 == pytest.approx(figure, abs=0.04)
