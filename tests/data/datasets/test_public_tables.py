"""Adult and credit default."""

import gzip

import numpy as np
import pytest

from vafl.data.datasets.adult import load_adult
from vafl.data.datasets.credit_default import load_credit_default
from vafl.errors import DataError

PERSON = "39, {work}, 7, 11th, 7, Divorced, Sales, Husband, White, Male, 2174, 0, 40, Cuba, {income}"
ROWS = {"adult.data": 4, "adult.test": 2}


def write_adult(folder):
    folder.mkdir()
    train = [
        PERSON.format(work="?" if n == 1 else "Private", income="<=50K" if n % 2 else ">50K")
        for n in range(4)
    ]
    test = [
        "|1x3 Cross validator",
        *(PERSON.format(work="State-gov", income=f"{sign}50K.") for sign in (">", "<=")),
    ]
    (folder / "adult.data").write_text("\n".join(train) + "\n\n")
    (folder / "adult.test.gz").write_bytes(gzip.compress("\n".join(test).encode()))


def test_adult_words_become_columns(tmp_path):
    write_adult(tmp_path / "adult")
    data = load_adult(tmp_path, ROWS)
    assert data.labels.tolist() == [1, 0, 1, 0, 1, 0]
    assert data.tests == 2
    assert {"age", "workclass=?", "workclass=Private", "workclass=State-gov"} <= set(data.columns)
    assert "fnlwgt" not in data.columns
    assert data.features[:, data.columns.index("workclass=?")].tolist() == [0, 1, 0, 0, 0, 0]
    assert data.features[4:, data.columns.index("workclass=State-gov")].tolist() == [1, 1]
    assert (data.features[:, data.columns.index("capital-gain")] == 2174).all()
    assert len(data.columns) == 107, "whoever is in the file"


def test_adult_is_checked(tmp_path):
    with pytest.raises(DataError, match=r"VFL-2181.*adult\.data or adult\.data\.gz"):
        load_adult(tmp_path)
    write_adult(tmp_path / "adult")
    with pytest.raises(DataError, match=r"VFL-2182.*32,561.*records.*4"):
        load_adult(tmp_path)
    alien = PERSON.format(work="Martian", income=">50K")
    (tmp_path / "adult" / "adult.data").write_text("\n".join([alien] * 4))
    with pytest.raises(DataError, match=r"VFL-2111.*workclass.*Martian"):
        load_adult(tmp_path, ROWS)
    (tmp_path / "adult" / "adult.data").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"VFL-2112.*15"):
        load_adult(tmp_path, ROWS)


def write_credit(folder, label="default.payment.next.month"):
    folder.mkdir(exist_ok=True)
    lines = [f"ID,LIMIT_BAL,PAY_0,{label}", *(f"{n},{n * 1000}.0,{n % 3},{n % 2}" for n in range(8))]
    (folder / "UCI_Credit_Card.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def test_credit_default(tmp_path):
    with pytest.raises(DataError, match="VFL-2181"):
        load_credit_default(tmp_path)
    write_credit(tmp_path / "credit_default")
    data = load_credit_default(tmp_path, rows=8)
    assert data.columns == ("LIMIT_BAL", "PAY_0")
    assert np.array_equal(data.features[:, 0], np.arange(8) * 1000)
    assert data.labels.tolist() == [0, 1] * 4
    with pytest.raises(DataError, match=r"VFL-2182.*30,000.*clients.*8"):
        load_credit_default(tmp_path)
    write_credit(tmp_path / "credit_default", "label")
    with pytest.raises(DataError, match="VFL-2131"):
        load_credit_default(tmp_path)
