"""The public tables on which the defaults for tables are chosen and judged, each split over three parties.

`tables/tables.json` in the data folder describes nine of them; Adult and credit default have files elsewhere.
Every fifth row of a table, counted from 0, is a test row. Adult has its own test file, and credit default a
random quarter.
"""

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
from sklearn.metrics import accuracy_score, r2_score, roc_auc_score

from experiments.people import SOURCES
from vafl.arrays import Array
from vafl.errors import DataError

CHOSEN_ON = (
    *("adult", "credit_default", "telco_churn", "census_income_kdd", "covertype", "california_housing"),
)
JUDGED_ON = ("online_shoppers", "polish_bankruptcy", "diabetes130", "fremtpl2_freq", "nyc_flights")
HOLDER = "A"  # the party with the labels


@dataclass(frozen=True)
class SuiteTable:
    """One table, with its training rows and its test rows.

    Attributes:
        known, new: training and test rows. All columns are text, and `label` is beside them.
        columns: party -> its columns.
        numeric: the columns that are quantities; all others are categories.
        missing: texts that mean a missing value, in addition to an empty field.
    """

    name: str
    known: pl.DataFrame
    new: pl.DataFrame
    columns: Mapping[str, list[str]]
    numeric: frozenset[str]
    metric: Literal["auc", "accuracy", "r2"]
    missing: str

    @property
    def task(self) -> str:
        return "regression" if self.metric == "r2" else "classification"

    def score(self, predictions: Array) -> float:
        """Return the table's metric on the test rows.

        Args:
            predictions: [rows], numbers or probabilities of the second class; [rows, classes] for several.
        """
        truth = self.new["label"]
        if self.metric == "r2":
            return float(r2_score(truth.cast(pl.Float64).to_numpy(), predictions))
        _, numbers = np.unique(truth.to_numpy(), return_inverse=True)
        if self.metric == "auc":
            return float(roc_auc_score(numbers, predictions))
        return float(accuracy_score(numbers, predictions.argmax(axis=1)))


def read_table(name: str, data: Path) -> SuiteTable:
    """Read one of the suite's tables from the folder of public data sets.

    Raises:
        DataError: a file is missing.
    """
    return _people(name, data) if name in SOURCES else _suite(name, data)


def _people(name: str, data: Path) -> SuiteTable:
    people = SOURCES[name](data)
    columns = dict(zip("ABC", people.columns.values(), strict=True))
    own = [column for part in columns.values() for column in part]
    numeric = {
        column
        for column in own
        if people.known.schema[column].is_numeric() and column not in people.categories
    }
    known, new = (part.select(pl.col(*own, "label").cast(pl.String)) for part in (people.known, people.new))
    return SuiteTable(name, known, new, columns, frozenset(numeric), "auc", "?")


def _suite(name: str, data: Path) -> SuiteTable:
    folder = data / "tables"
    path = folder / name / f"{name}.csv.gz"
    if not path.is_file():
        raise DataError(
            "VFL-0002",
            f'the tables must be in "{folder}". Found no {path.name}. Give their folder as --data.',
        )
    about = json.loads((folder / "tables.json").read_text())[name]
    lines = pl.read_csv(gzip.decompress(path.read_bytes()), infer_schema=False)
    label = pl.col(about["label"])
    metric: Literal["auc", "accuracy", "r2"] = "auc"
    if name == "fremtpl2_freq":
        label = (label.cast(pl.Float64) > 0).cast(pl.Int8)
    elif name in ("california_housing", "nyc_flights"):
        metric = "r2"
    elif name == "covertype":
        metric = "accuracy"
    else:
        label = (label.str.strip_chars() == about["positive"]).cast(pl.Int8)
    columns = {
        party: [column for column in own if column != about["id"]] for party, own in about["parties"].items()
    }
    own = [column for part in columns.values() for column in part]
    lines = lines.select(*own, label=label.cast(pl.String)).with_row_index("row")
    lines = lines.filter(pl.col("label").is_not_null() & (pl.col("label") != ""))
    is_test = pl.col("row") % 5 == 0
    known, new = (lines.filter(part).drop("row") for part in (~is_test, is_test))
    return SuiteTable(
        name,
        known,
        new,
        columns,
        frozenset(about["numeric"]) & set(own),
        metric,
        (about["missing"] or "").strip(),
    )
