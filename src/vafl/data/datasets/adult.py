"""Load Adult, or Census Income (UCI 2): predict who earns more than 50,000 dollars a year."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl

from vafl.data.dataset import Dataset
from vafl.data.datasets.public import plain_or_gzipped, require_count
from vafl.errors import DataError

_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country"),
    "income",
)
# The categories of each text column, from the data set's documentation; ? means unknown. A list made from the
# file would reveal which categories its people have.
_WORDS = {
    "workclass": "? Federal-gov Local-gov Never-worked Private Self-emp-inc Self-emp-not-inc State-gov "
    "Without-pay",
    "education": "10th 11th 12th 1st-4th 5th-6th 7th-8th 9th Assoc-acdm Assoc-voc Bachelors Doctorate "
    "HS-grad Masters Preschool Prof-school Some-college",
    "marital-status": "Divorced Married-AF-spouse Married-civ-spouse Married-spouse-absent Never-married "
    "Separated Widowed",
    "occupation": "? Adm-clerical Armed-Forces Craft-repair Exec-managerial Farming-fishing "
    "Handlers-cleaners Machine-op-inspct Other-service Priv-house-serv Prof-specialty Protective-serv Sales "
    "Tech-support Transport-moving",
    "relationship": "Husband Not-in-family Other-relative Own-child Unmarried Wife",
    "race": "Amer-Indian-Eskimo Asian-Pac-Islander Black Other White",
    "sex": "Female Male",
    "native-country": "? Cambodia Canada China Columbia Cuba Dominican-Republic Ecuador El-Salvador England "
    "France Germany Greece Guatemala Haiti Holand-Netherlands Honduras Hong Hungary India Iran Ireland Italy "
    "Jamaica Japan Laos Mexico Nicaragua Outlying-US(Guam-USVI-etc) Peru Philippines Poland Portugal "
    "Puerto-Rico Scotland South Taiwan Thailand Trinadad&Tobago United-States Vietnam Yugoslavia",
}
ROWS = {"adult.data": 32_561, "adult.test": 16_281}
_SOURCE = "the UCI Machine Learning Repository (data set 2, adult.data and adult.test)"


def load_adult(folder: Path, rows: Mapping[str, int] = ROWS) -> Dataset:
    """Read folder/adult, plain or gzipped.

    Numbers stay numbers. Each category becomes a column of 0 and 1, such as `workclass=Private`; a missing
    value has the category `workclass=?`. `fnlwgt` is left out: it is a census weight, not a property of the
    person.

    Args:
        rows: file -> the number of records that it must have.
    """
    parts = read_adult(folder, rows)
    both = pl.concat(parts)
    columns = both.drop("income", "fnlwgt")
    encoded = pl.DataFrame([feature for column in columns for feature in _features(column)])
    labels = (both["income"].str.strip_chars(".") == ">50K").to_numpy().astype(np.int64)
    return Dataset(
        name="adult",
        features=encoded.to_numpy(),
        labels=labels,
        tests=parts[1].height,
        columns=tuple(encoded.columns),
        classes=("<=50K", ">50K"),
    )


def _features(column: pl.Series) -> list[pl.Series]:
    """Return a number column unchanged, or one column of 0 and 1 for each possible category."""
    if column.name not in _WORDS:
        return [column]
    words = _WORDS[column.name].split()
    if unknown := sorted(set(column) - set(words)):
        raise DataError(
            "VFL-2111",
            f'Adult\'s {column.name} must be one of {", ".join(words)}. Found "{unknown[0]}". Download the '
            "data set again.",
        )
    return [(column == word).cast(pl.Float32).alias(f"{column.name}={word}") for word in words]


def read_adult(folder: Path, rows: Mapping[str, int] = ROWS) -> list[pl.DataFrame]:
    """Return the training and the test records, with text columns as text."""
    return [_read(folder / "adult", name, count) for name, count in rows.items()]


def _read(folder: Path, name: str, rows: int) -> pl.DataFrame:
    path = plain_or_gzipped("Adult", folder / name, _SOURCE)
    try:
        lines = pl.read_csv(
            path, has_header=False, new_columns=_COLUMNS, infer_schema=False, comment_prefix="|"
        )
        table = lines.drop_nulls().with_columns(pl.all().str.strip_chars())
        numbers = [column for column in _COLUMNS if column not in (*_WORDS, "income")]
        table = table.with_columns(pl.col(numbers).cast(pl.Float32))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(
            "VFL-2112",
            f'"{path}" must have {len(_COLUMNS)} columns, separated by commas, and no header. Found: {error} '
            "Download it again.",
        ) from error
    require_count(path, "records", table.height, rows)
    return table
