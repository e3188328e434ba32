"""Load the PhysioNet/CinC Challenge 2012: predict death in hospital from 48 hours of intensive care."""

import lzma
from pathlib import Path

import numpy as np
import polars as pl

from vafl.arrays import Floats, Integers
from vafl.data.dataset import Dataset, digest_of
from vafl.data.datasets.public import missing_data, require, require_count
from vafl.data.datasets.series import Measurements, by_hour, filled, names
from vafl.errors import DataError

_DESCRIPTORS = ("Age", "Gender", "Height")
_UNITS = tuple(f"ICUType={number}" for number in range(1, 5))
_SERIES = (
    *("ALP", "ALT", "AST", "Albumin", "BUN", "Bilirubin", "Cholesterol", "Creatinine", "DiasABP", "FiO2"),
    *("GCS", "Glucose", "HCO3", "HCT", "HR", "K", "Lactate", "MAP", "MechVent", "Mg", "NIDiasABP", "NIMAP"),
    *("NISysABP", "Na", "PaCO2", "PaO2", "Platelets", "RespRate", "SaO2", "SysABP", "Temp", "TroponinI"),
    *("TroponinT", "Urine", "WBC", "Weight", "pH"),
)
FEATURES = (*_DESCRIPTORS, *_UNITS, *_SERIES)
_DEATHS = {"a": (4_000, 554), "b": (4_000, 568)}
_SOURCE = "https://physionet.org/content/challenge-2012 (sets a and b with their outcomes)"
_SCHEMA = {"RecordID": pl.Int64, "Time": pl.String, "Parameter": pl.String, "Value": pl.Float64}


def load_physionet2012(folder: Path, deaths: dict[str, tuple[int, int]] = _DEATHS) -> Dataset:
    """Read folder/physionet2012: set a for training, set b for testing, [stays, 48, columns].

    A set is one file, set-a.csv or set-a.csv.xz (RecordID, Time, Parameter, Value), or the challenge's folder
    set-a of text files. The columns are the 44 features, followed by 44 indicators of whether each was
    measured in that hour (`HR:seen`).

    Args:
        deaths: set -> the numbers of stays and deaths that it must have.
    """
    folder = folder / "physionet2012"
    parts = [_read_set(folder, name, *expected) for name, expected in deaths.items()]
    return Dataset(
        name="physionet2012",
        features=filled(parts[0][0], parts[1][0]),
        labels=np.concatenate([died for _, died, _ in parts]),
        columns=names(FEATURES),
        classes=("survived", "died"),
        fitted=True,
        tests=len(parts[1][1]),
        digest=digest_of(*(ids for _, _, ids in parts)),
    )


def _read_set(folder: Path, name: str, stays: int, deaths: int) -> tuple[Floats, Integers, Integers]:
    """Return the hourly values, 1 for each patient who died, and the record numbers."""
    outcomes = folder / f"Outcomes-{name}.txt"
    require("PhysioNet 2012", [outcomes], _SOURCE)
    try:
        known = pl.read_csv(outcomes).sort("RecordID")
        ids = known["RecordID"].to_numpy()
        died = known["In-hospital_death"].cast(pl.Int64).to_numpy(writable=True)
        rows = _rows(folder, name)
    except (pl.exceptions.PolarsError, OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(
            "VFL-2171",
            f'"{folder}": set {name} must have the columns RecordID, Time, Parameter and Value, and its '
            f"outcomes RecordID and In-hospital_death. Found: {error} Download it again.",
        ) from error
    require_count(outcomes, "stays", len(ids), stays)
    require_count(outcomes, "deaths", int(died.sum()), deaths)
    measured = rows["RecordID"].unique()
    require_count(
        folder / f"set-{name}", "stays with an outcome", int(measured.is_in(ids.tolist()).sum()), stays
    )
    return by_hour(_measurements(rows, ids), len(ids), len(FEATURES)), died, ids


def _rows(folder: Path, name: str) -> pl.DataFrame:
    """Return all measurements of a set, with their RecordID."""
    packed, plain, texts = folder / f"set-{name}.csv.xz", folder / f"set-{name}.csv", folder / f"set-{name}"
    if packed.is_file():
        return pl.read_csv(lzma.decompress(packed.read_bytes()), schema=_SCHEMA)
    if plain.is_file():
        return pl.read_csv(plain, schema=_SCHEMA)
    if not texts.is_dir():
        raise missing_data("PhysioNet 2012", folder, f"{packed.name}, or the folder {texts.name}", _SOURCE)
    schema = {key: kind for key, kind in _SCHEMA.items() if key != "RecordID"}
    rows = pl.scan_csv(texts / "*.txt", schema=schema, include_file_paths="file").collect()
    number = pl.col("file").str.extract(r"(\d+)\.txt$").cast(pl.Int64).alias("RecordID")
    return rows.with_columns(number).filter(pl.col("Parameter") != "RecordID")


def _measurements(rows: pl.DataFrame, ids: Integers) -> Measurements:
    """Drop unknown values, which are -1, and encode the type of the care unit as four indicators."""
    rows = rows.filter(pl.col("Value") != -1)
    units = rows.filter(pl.col("Parameter") == "ICUType").join(
        pl.DataFrame({"Unit": [1.0, 2.0, 3.0, 4.0], "Feature": list(_UNITS)}), how="cross"
    )
    units = units.select(
        "RecordID", "Time", Parameter="Feature", Value=(pl.col("Value") == pl.col("Unit")).cast(pl.Float64)
    )
    rows = pl.concat([rows.select(units.columns), units]).filter(pl.col("Parameter").is_in(FEATURES))
    time = rows["Time"].str.split_exact(":", 1).struct.unnest().cast(pl.Float64)
    numbers = rows["Parameter"].replace_strict({name: i for i, name in enumerate(FEATURES)})
    return Measurements(
        stay=np.searchsorted(ids, rows["RecordID"].to_numpy()),
        hour=(time.to_series(0) + time.to_series(1) / 60).to_numpy(),
        feature=numbers.to_numpy(),
        value=rows["Value"].to_numpy(),
    )
