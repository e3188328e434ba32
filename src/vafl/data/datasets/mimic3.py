"""MIMIC-III, as the in-hospital-mortality task of its public benchmark lays it out. For licensed users."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from vafl.data.dataset import Array, Dataset, digest_of
from vafl.data.datasets.public import missing_data, require
from vafl.data.datasets.series import Measurements, by_hour, filled, names
from vafl.errors import DataError

FEATURES = (
    *("Capillary refill rate", "Diastolic blood pressure", "Fraction inspired oxygen"),
    *("Glascow coma scale eye opening", "Glascow coma scale motor response", "Glascow coma scale total"),
    *("Glascow coma scale verbal response", "Glucose", "Heart Rate", "Height", "Mean blood pressure"),
    *("Oxygen saturation", "Respiratory rate", "Systolic blood pressure", "Temperature", "Weight", "pH"),
)
# The coma scale's answers are words, some with their score in front and some without.
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
    """Reads folder/mimic3/in-hospital-mortality: train and test, each a listfile.csv and its stays.

    Gives [stays, 48, columns] like `load_physionet2012`.
    """
    folder = folder / "mimic3" / "in-hospital-mortality"
    (own, own_died, stays), (held_out, died, others) = (_read(folder / name) for name in ("train", "test"))
    return Dataset(
        name="mimic3",
        features=filled(own, held_out),
        labels=np.concatenate([own_died, died]),
        columns=names(FEATURES),
        classes=("survived", "died"),
        fitted=True,
        tests=len(died),
        digest=digest_of([*map(_number, stays)], [*map(_number, others)]),
    )


def _read(folder: Path) -> tuple[Array, npt.NDArray[np.int64], list[str]]:
    """The hourly values, who died, and the stays' file names."""
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
            f"Hours, {', '.join(FEATURES[:3])}, ... {error} Make it again with the benchmark's scripts.",
        ) from error
    stay_of = (
        rows["file"].str.extract(r"([^/\\]+)$").replace_strict({stay: i for i, stay in enumerate(stays)})
    )
    return by_hour(_measurements(table, stay_of.to_numpy()), len(stays), len(FEATURES)), died, stays


def _number_in(name: str) -> pl.Expr:
    """A column's numbers; of words, the score they stand for."""
    text = pl.col(name).str.strip_chars()
    score = text.replace_strict(_SCORES, default=None, return_dtype=pl.Float64)
    return pl.coalesce(text.str.extract(r"^(-?[0-9]*\.?[0-9]+)").cast(pl.Float64), score).alias(name)


def _measurements(table: pl.DataFrame, stay: npt.NDArray[np.integer]) -> Measurements:
    """Every cell as one measurement; an empty one is NaN, and is left out later."""
    values = table.drop("Hours").fill_null(float("nan")).to_numpy()
    features = values.shape[1]
    return Measurements(
        stay=np.repeat(stay, features),
        hour=np.repeat(table["Hours"].to_numpy(), features),
        feature=np.tile(np.arange(features), len(values)),
        value=values.ravel(),
    )


def _number(stay: str) -> int:
    """`10011_episode1_timeseries.csv` -> a number of its own."""
    patient, episode = stay.split("_")[:2]
    return int(patient) * 1_000 + int(episode.removeprefix("episode"))
