"""Load the in-hospital-mortality task of the public MIMIC-III benchmark. The data needs a licence."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from vafl.arrays import Floats, Integers
from vafl.data.dataset import Dataset, digest_of
from vafl.data.datasets.public import missing_data, require
from vafl.data.datasets.series import Measurements, by_hour, filled, names
from vafl.errors import DataError

FEATURES = (
    *("Capillary refill rate", "Diastolic blood pressure", "Fraction inspired oxygen"),
    *("Glascow coma scale eye opening", "Glascow coma scale motor response", "Glascow coma scale total"),
    *("Glascow coma scale verbal response", "Glucose", "Heart Rate", "Height", "Mean blood pressure"),
    *("Oxygen saturation", "Respiratory rate", "Systolic blood pressure", "Temperature", "Weight", "pH"),
)
# The values of the coma scale are words, some with their score in front and some without.
_SCORES = {
    "None": 1,
    "No Response": 1,
    "No response": 1,
    "No Response-ETT": 1,
    "To Pain": 2,
    "To Speech": 3,
    "Spontaneously": 4,
    "Abnormal extension": 2,
    "Abnormal Flexion": 3,
    "Flex-withdraws": 4,
    "Localizes Pain": 5,
    "Obeys Commands": 6,
    "Incomprehensible sounds": 2,
    "Inappropriate Words": 3,
    "Confused": 4,
    "Oriented": 5,
}
_SOURCE = (
    "https://physionet.org/content/mimiciii after its training and licence, and make the task's folders with "
    "https://github.com/YerevaNN/mimic3-benchmarks"
)


def load_mimic3(folder: Path) -> Dataset:
    """Read the folders train and test of folder/mimic3/in-hospital-mortality.

    Each has a listfile.csv and the files of its stays. The features are [stays, 48, columns], as in
    `load_physionet2012`.
    """
    folder = folder / "mimic3" / "in-hospital-mortality"
    train, train_died, train_stays = _read(folder / "train")
    test, test_died, test_stays = _read(folder / "test")
    return Dataset(
        name="mimic3",
        features=filled(train, test),
        labels=np.concatenate([train_died, test_died]),
        columns=names(FEATURES),
        classes=("survived", "died"),
        fitted=True,
        tests=len(test_died),
        digest=digest_of([*map(_number, train_stays)], [*map(_number, test_stays)]),
    )


def _read(folder: Path) -> tuple[Floats, Integers, list[str]]:
    """Return the hourly values, 1 for each patient who died, and the stays' file names."""
    listing = folder / "listfile.csv"
    require("MIMIC-III's in-hospital-mortality task", [listing], _SOURCE)
    try:
        known = pl.read_csv(listing).sort("stay")
        stays, died = known["stay"].to_list(), known["y_true"].cast(pl.Int64).to_numpy(writable=True)
        files = [folder / stay for stay in stays]
        if absent := [path.name for path in files if not path.is_file()]:
            raise missing_data(f'{len(absent)} stays of "{listing}"', folder, absent[0], _SOURCE)
        rows = pl.scan_csv(files, infer_schema=False, include_file_paths="file").collect()
        table = rows.select(pl.col("Hours").cast(pl.Float64), *(_number_in(name) for name in FEATURES))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(
            "VFL-2141",
            f'"{folder}" must hold listfile.csv (stay, y_true) and, for each stay, a CSV with the columns '
            f"Hours, {', '.join(FEATURES[:3])}, ... Found: {error} Create it again with the benchmark's "
            "scripts.",
        ) from error
    stay_of = (
        rows["file"].str.extract(r"([^/\\]+)$").replace_strict({stay: i for i, stay in enumerate(stays)})
    )
    return by_hour(_measurements(table, stay_of.to_numpy()), len(stays), len(FEATURES)), died, stays


def _number_in(name: str) -> pl.Expr:
    """Return an expression for a column's numbers; words become the score that they mean."""
    text = pl.col(name).str.strip_chars()
    score = text.replace_strict(_SCORES, default=None, return_dtype=pl.Float64)
    return pl.coalesce(text.str.extract(r"^(-?[0-9]*\.?[0-9]+)").cast(pl.Float64), score).alias(name)


def _measurements(table: pl.DataFrame, stay: npt.NDArray[np.integer]) -> Measurements:
    """Return every cell as one measurement. An empty cell is NaN, which `by_hour` leaves out."""
    values = table.drop("Hours").fill_null(float("nan")).to_numpy()
    features = values.shape[1]
    return Measurements(
        stay=np.repeat(stay, features),
        hour=np.repeat(table["Hours"].to_numpy(), features),
        feature=np.tile(np.arange(features), len(values)),
        value=values.ravel(),
    )


def _number(stay: str) -> int:
    """Return a unique number for a stay such as `10011_episode1_timeseries.csv`."""
    patient, episode = stay.split("_")[:2]
    return int(patient) * 1_000 + int(episode.removeprefix("episode"))
