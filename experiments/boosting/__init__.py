"""Gradient boosting on the pooled table: the reference of experiments.tables."""

import subprocess
from pathlib import Path

import numpy as np
import polars as pl
from benchmarks.peers.environment import environment
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.preprocessing import OrdinalEncoder

from experiments.suite import SuiteTable
from vafl.arrays import Array, Doubles, Flags

_HERE = Path(__file__).parent
_MOST_LEVELS = 254  # HistGradientBoosting takes 255 levels of a category; rarer ones share a code


def pooled_columns(table: SuiteTable, parties: str = "ABC") -> tuple[Doubles, Doubles, Flags]:
    """Return the training rows, the test rows, and which columns are categories.

    Gaps are NaN and categories are codes, as the suite's README describes.
    """
    columns = [column for party in parties for column in table.columns[party]]
    numbers = [column for column in columns if column in table.numeric]
    words = [column for column in columns if column not in table.numeric]
    parts = [_read(table, rows) for rows in (table.known, table.new)]
    arrays = [part.select(numbers).to_numpy() if numbers else np.empty((part.height, 0)) for part in parts]
    if words:
        codes = OrdinalEncoder(
            max_categories=_MOST_LEVELS,
            handle_unknown="use_encoded_value",
            unknown_value=np.nan,
            encoded_missing_value=np.nan,
        ).fit(parts[0].select(words).to_numpy())
        arrays = [
            np.concatenate([array, codes.transform(part.select(words).to_numpy())], axis=1)
            for array, part in zip(arrays, parts, strict=True)
        ]
    train, test = arrays
    return train, test, np.arange(len(columns)) >= len(numbers)


def _read(table: SuiteTable, rows: pl.DataFrame) -> pl.DataFrame:
    """Read the columns: text with nulls for gaps, and numbers."""
    text = pl.all().str.strip_chars()
    there = rows.select(pl.when(~text.is_in(["", table.missing])).then(text).name.keep())
    return (
        there.with_columns(pl.col(*table.numeric).cast(pl.Float64, strict=False)) if table.numeric else there
    )


def labels(table: SuiteTable) -> Array:
    """Return the training labels: numbers, or class numbers."""
    known = table.known["label"]
    if table.metric == "r2":
        return known.cast(pl.Float64).to_numpy()
    return np.unique(known.to_numpy(), return_inverse=True)[1]


def hist_gradient_boosting(table: SuiteTable, parties: str = "ABC") -> float:
    """Return the test metric of scikit-learn's model with default settings."""
    train, test, is_category = pooled_columns(table, parties)
    if table.metric == "r2":
        model = HistGradientBoostingRegressor(random_state=0, categorical_features=is_category)
        return table.score(model.fit(train, labels(table)).predict(test))
    model = HistGradientBoostingClassifier(random_state=0, categorical_features=is_category)
    shares = model.fit(train, labels(table)).predict_proba(test)
    return table.score(shares[:, 1] if table.metric == "auc" else shares)


def lightgbm(table: SuiteTable, folder: Path) -> float:
    """Return the test metric of LightGBM with default settings, run in a separate environment."""
    python = environment("lightgbm", _HERE / "requirements.txt")
    train, test, is_category = pooled_columns(table)
    folder.mkdir(parents=True, exist_ok=True)
    given, found = folder / "pooled.npz", folder / "scores.npy"
    np.savez(given, train=train, test=test, labels=labels(table), is_category=is_category)
    command = [str(python), str(_HERE / "lightgbm_scores.py"), table.task, str(given), str(found)]
    subprocess.run(command, check=True)
    return table.score(np.load(found))
