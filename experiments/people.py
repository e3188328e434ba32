"""Adult and credit default as tables of people, whose columns several companies hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from vafl.data.datasets.adult import ROWS, read_adult
from vafl.data.datasets.credit_default import load_credit_default
from vafl.data.settings import DataSettings
from vafl.data.split import Split


@dataclass(frozen=True)
class People:
    """A public table, and which company holds which columns.

    Attributes:
        known, new: people to train on, and new people: the companies' columns and `label`, 0 or 1.
        columns: company -> its columns.
        categories: columns of numbers that stand for categories.
    """

    known: pl.DataFrame
    new: pl.DataFrame
    columns: Mapping[str, list[str]]
    categories: tuple[str, ...] = ()


def adult(folder: Path, rows: Mapping[str, int] = ROWS) -> People:
    """Load Adult: who earns more than 50,000? `rows` are the numbers of rows of the two files."""
    label = pl.col("income").str.starts_with(">").cast(pl.Int64)
    known, new = (part.with_columns(label=label) for part in read_adult(folder, rows))
    columns = {
        "bank": ["age", "education", "education-num", "workclass", "race", "sex"],
        "register": ["marital-status", "relationship", "native-country"],
        "tax": ["occupation", "capital-gain", "capital-loss", "hours-per-week"],
    }
    return People(known, new, columns)


def credit_default(folder: Path) -> People:
    """Load credit default: who fails to pay next month? A random quarter are the new people."""
    data = load_credit_default(folder)
    split = Split.of(len(data.labels), DataSettings(test_fraction=0.25), seed=0)
    people = pl.DataFrame(data.features, schema=list(data.columns)).with_columns(label=pl.Series(data.labels))
    known, new = (people[split.order[split.parts.slices[part]]] for part in ("train", "test"))
    columns = {
        "bank": ["LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE"],
        "bureau": ["PAY_0", "PAY_2", "PAY_3", "PAY_4", "PAY_5", "PAY_6"],
        "shop": [f"{kind}_AMT{month}" for kind in ("BILL", "PAY") for month in range(1, 7)],
    }
    return People(known, new, columns, ("SEX", "EDUCATION", "MARRIAGE"))


SOURCES = {"adult": adult, "credit_default": credit_default}
