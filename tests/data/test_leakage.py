"""Columns that alone predict the label."""

import numpy as np
import polars as pl
import pytest
import torch

from vafl.data import leakage
from vafl.data.fitting import fit
from vafl.data.partition import Party, VerticalData
from vafl.data.source_settings import TableSettings
from vafl.data.split import Parts
from vafl.data.tables import POSITION, Table


def data_of(tmp_path, columns, labels, classes):
    """Return a party's table as codes, and the labels."""
    rows = len(labels)
    pl.DataFrame({"id": [f"r{row}" for row in range(rows)], **columns}).write_csv(tmp_path / "own.csv")
    table = Table("bank", TableSettings(str(tmp_path / "own.csv"), "id"))
    wanted = pl.DataFrame({"id": table.ids(), POSITION: np.arange(rows)})
    encoder, _ = fit(table, wanted, form="codes")
    features = encoder.read(table, wanted, rows)
    party = Party("bank", torch.from_numpy(features), encoder)
    return VerticalData((party,), torch.as_tensor(labels), Parts(rows), classes)


@pytest.fixture
def chance():
    return np.random.default_rng(0)


def test_a_copy_of_the_label_is_a_suspect_and_an_honest_column_is_not(tmp_path, chance):
    labels = chance.integers(0, 2, 2_000)
    columns = {
        "paid out": np.where(labels, chance.lognormal(5, 1, 2_000), 0),
        "status": np.where(labels, "closed", "open"),
        "income": labels + chance.normal(size=2_000),  # predicts, but not perfectly
    }
    found = leakage.warnings(data_of(tmp_path, columns, labels, ("no", "yes")))
    assert sorted(sentence.split('"')[1] for sentence in found) == ["paid out", "status"]


def test_a_number_in_other_units_is_a_suspect(tmp_path, chance):
    price = chance.normal(100, 20, 5_000)
    columns = {"price in cents": price * 100, "size": price + chance.normal(0, 20, 5_000)}
    found = leakage.warnings(data_of(tmp_path, columns, price, None))
    assert [sentence.split('"')[1] for sentence in found] == ["price in cents"]


def test_one_of_several_classes_may_be_rare(tmp_path, chance):
    labels = chance.choice(3, 3_000, p=[0.9, 0.08, 0.02])
    columns = {"mostly the first": (labels == 0).astype(int), "code": labels + 10}
    found = leakage.warnings(data_of(tmp_path, columns, labels, ("a", "b", "c")))
    assert [sentence.split('"')[1] for sentence in found] == ["code"]


def test_labels_of_one_value_or_few_rows_accuse_nobody(tmp_path, chance):
    one = np.zeros(500, dtype=np.int64)
    assert leakage.warnings(data_of(tmp_path, {"x": chance.normal(size=500)}, one, ("a", "b"))) == []
    few = chance.integers(0, 2, 50)
    assert leakage.warnings(data_of(tmp_path, {"x": few.copy()}, few, ("a", "b"))) == []
