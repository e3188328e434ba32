"""PhysioNet 2012 and MIMIC-III: from files of measurements to hourly series."""

import lzma

import numpy as np
import pytest

from vafl.config import from_document
from vafl.data.datasets.mimic3 import FEATURES as MIMIC_FEATURES
from vafl.data.datasets.mimic3 import load_mimic3
from vafl.data.datasets.physionet2012 import load_physionet2012
from vafl.data.datasets.series import HOURS, Measurements, by_hour, filled
from vafl.data.partition import partition
from vafl.data.public import _PUBLIC
from vafl.data.settings import DataSettings, PartitionSettings
from vafl.data.split import Split
from vafl.errors import ConfigError, DataError
from vafl.run.plan import load_data

DEATHS = {"a": (3, 1), "b": (2, 1)}
RECORDS = {"a": (101, 102, 103), "b": (201, 202)}


def lines(record):
    """Return a record's measurements: a known pulse, an unknown height, one value after the last hour."""
    yield from (
        ("00:00", "Age", 50 + record % 10),
        ("00:00", "Height", -1),
        ("00:00", "ICUType", 1 + record % 4),
    )
    yield from (
        ("00:30", "HR", 80),
        ("00:45", "HR", 90),
        ("05:10", "HR", 100),
        ("48:00", "HR", 60 + record % 10),
    )


def write_physionet(folder, form):
    folder.mkdir(parents=True)
    for name, records in RECORDS.items():
        outcomes = "".join(f"{record},1,1,5,-1,{int(record == records[0])}\n" for record in records)
        header = "RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death\n"
        (folder / f"Outcomes-{name}.txt").write_text(header + outcomes)
        rows = [
            f"{record},{time},{what},{value}" for record in records for time, what, value in lines(record)
        ]
        whole = "\n".join(["RecordID,Time,Parameter,Value", *rows]).encode()
        if form == "xz":
            (folder / f"set-{name}.csv.xz").write_bytes(lzma.compress(whole))
        elif form == "csv":
            (folder / f"set-{name}.csv").write_bytes(whole)
        else:
            (folder / f"set-{name}").mkdir()
            for record in records:
                own = [f"{time},{what},{value}" for time, what, value in lines(record)]
                text = "\n".join(["Time,Parameter,Value", f"00:00,RecordID,{record}", *own])
                (folder / f"set-{name}" / f"{record}.txt").write_text(text)


@pytest.mark.parametrize("mode", ["release_once", "embed_only"])
def test_statistics_of_all_stays_are_refused_where_each_is_promised_something(tmp_path, monkeypatch, mode):
    write_physionet(tmp_path / "physionet2012", "csv")
    monkeypatch.setitem(_PUBLIC, "physionet2012", lambda folder: load_physionet2012(folder, DEATHS))
    data = {"name": "physionet2012", "folder": str(tmp_path), "scale": "none"}
    budget = {"mu_max": 2.0} if mode == "release_once" else {}
    config = from_document({"data": data, "privacy": {"mode": mode, "clip": 1.0, "noise": 1.0, **budget}})
    if mode == "embed_only":
        assert load_data(config).rows == 3
    else:
        with pytest.raises(ConfigError, match=r"VFL-7154.*physionet2012"):
            load_data(config)


@pytest.mark.parametrize("form", ["xz", "csv", "folder"])
def test_physionet_by_the_hour(tmp_path, form):
    write_physionet(tmp_path / "physionet2012", form)
    data = load_physionet2012(tmp_path, DEATHS)
    assert data.features.shape == (5, HOURS, 88)
    assert data.labels[:3].tolist() == [1, 0, 0]
    column = {name: number for number, name in enumerate(data.columns)}
    pulse, seen = (data.features[0, :, column[name]] for name in ("HR", "HR:seen"))
    assert pulse[[0, 1, 4, 5, 46]].tolist() == [85, 85, 85, 100, 100]  # carried forward until the next value
    assert pulse[47] == 61
    assert np.flatnonzero(seen).tolist() == [0, 5, 47]
    assert data.features[0, 30, column["ICUType=2"]] == 1
    assert data.features[0, 30, column["ICUType=1"]] == 0
    assert not data.features[:3, :, column["Height:seen"]].any()
    groups = PartitionSettings(groups={"heart": ("HR*",), "rest": ("Age*", "pH*")})
    split = Split.of_dataset(data, DataSettings("physionet2012"), 0)
    parties = partition(data, split, groups).parties
    assert [tuple(party.features.shape) for party in parties] == [(5, HOURS, 2), (5, HOURS, 4)]
    assert float(parties[0].features[:3, ..., 0].mean()) == pytest.approx(0, abs=1e-5)


def test_physionet_counts_are_checked(tmp_path):
    write_physionet(tmp_path / "physionet2012", "csv")
    with pytest.raises(DataError, match=r"VFL-2182.*4,000.*stays.*3"):
        load_physionet2012(tmp_path)
    with pytest.raises(DataError, match=r"VFL-2182.*2.*deaths.*1"):
        load_physionet2012(tmp_path, {**DEATHS, "b": (2, 2)})
    (tmp_path / "physionet2012" / "set-b.csv").unlink()
    with pytest.raises(DataError, match=r"VFL-2181.*set\-b\.csv\.xz, or the folder set\-b"):
        load_physionet2012(tmp_path, DEATHS)
    (tmp_path / "physionet2012" / "set-b.csv.xz").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"VFL-2171.*b"):
        load_physionet2012(tmp_path, DEATHS)


def write_mimic(folder):
    for split, stays in (("train", ("7_episode1", "8_episode2")), ("test", ("9_episode1",))):
        (folder / split).mkdir(parents=True)
        listed = "".join(f"{stay}_timeseries.csv,{number}\n" for number, stay in enumerate(stays))
        (folder / split / "listfile.csv").write_text("stay,y_true\n" + listed)
        for stay in stays:
            empty = dict.fromkeys(MIMIC_FEATURES, "")
            first = {**empty, "Heart Rate": "80", "Glascow coma scale eye opening": "To Pain"}
            later = {**empty, "pH": "7.4", "Glascow coma scale eye opening": "4 Spontaneously"}
            rows = [[hour, *row.values()] for hour, row in (("0.5", first), ("3.25", later))]
            text = "\n".join(",".join(row) for row in [["Hours", *MIMIC_FEATURES], *rows])
            (folder / split / f"{stay}_timeseries.csv").write_text(text)


def test_mimic_as_its_benchmark_lays_it_out(tmp_path):
    folder = tmp_path / "mimic3" / "in-hospital-mortality"
    write_mimic(folder)
    data = load_mimic3(tmp_path)
    assert data.fitted
    assert data.features.shape == (3, HOURS, 2 * len(MIMIC_FEATURES))
    assert data.labels.tolist() == [0, 1, 0]
    eyes = data.features[1, :, data.columns.index("Glascow coma scale eye opening")]
    assert np.round(eyes[[0, 2, 3, 47]]).tolist() == [2, 2, 4, 4]
    (folder / "test" / "9_episode1_timeseries.csv").unlink()
    with pytest.raises(DataError, match=r"VFL-2181.*9_episode1_timeseries\.csv"):
        load_mimic3(tmp_path)
    (folder / "train" / "7_episode1_timeseries.csv").write_text("Hours,What\n1,2\n")
    with pytest.raises(DataError, match="VFL-2141"):
        load_mimic3(tmp_path)


def test_values_beyond_the_usual_are_pulled_in():
    hours = np.linspace(0, 47.9, 1000)
    values = np.r_[np.full(999, 37.0), -17.0]
    nothing = np.zeros(1000, np.int64)
    series = by_hour(Measurements(nothing, hours, nothing, values), 1, 1)
    own = filled(series, series)
    assert own[0, :, 0].min() > 30
