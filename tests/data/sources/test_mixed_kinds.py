"""Parties with different kinds of sources: the same rows everywhere, with and without absent records."""

import numpy as np
import pytest
from PIL import Image

from tests.data.sources.making import write_array, write_images, write_series, write_table
from vafl.data.aligned import join, load_tables
from vafl.data.settings import DataSettings
from vafl.data.source_settings import ImageSettings
from vafl.errors import ConfigError, DataError

PEOPLE = [f"P{number:02d}" for number in range(40)]


@pytest.fixture
def sources(tmp_path):
    """Sources of 40 people in which every value is the person's number; some parties lack some of them."""
    chance = np.random.default_rng(0)

    def some(count):
        return sorted(chance.choice(40, count, replace=False), key=lambda _: chance.random())

    labelled = write_table(tmp_path, PEOPLE, "labels", label=["no", "yes"] * 20)
    held = {name: some(count) for name, count in (("bank", 38), ("lab", 36), ("ward", 37), ("scan", 39))}
    bank = write_table(
        tmp_path, [PEOPLE[n] for n in held["bank"]], "bank", number=[n + 0.5 for n in held["bank"]]
    )
    lines = [(PEOPLE[n], step, n) for step in range(3) for n in held["ward"] if step >= n % 3]
    ward = write_series(tmp_path, lines)
    lab = write_array(
        tmp_path, [PEOPLE[n] for n in held["lab"]], np.array(held["lab"])[:, None], scale="none"
    )
    write_images(tmp_path / "photos", [PEOPLE[n] for n in held["scan"]])
    for n in held["scan"]:
        Image.new("L", (6, 4), int(n)).save(tmp_path / "photos" / f"{PEOPLE[n]}.png")
    return {
        "server": type(labelled)(labelled.path, "id", label="label"),
        **{"bank": bank, "ward": ward, "lab": lab, "scan": ImageSettings(str(tmp_path / "photos"))},
    }


def settings(**changes):
    parties = ("bank", "ward", "lab", "scan")
    return DataSettings("parties", parties=parties, scale="none", **changes)


@pytest.mark.parametrize("records", ["common", "labelled"])
def test_a_row_is_the_same_person_at_every_party(sources, records):
    data = load_tables(settings(records=records), sources, 0)
    numbers_of = {
        "bank": lambda row: row[0] - 0.5,
        "ward": lambda row: row.ravel()[:6].reshape(3, 2)[-1, 0],
        "lab": lambda row: row[0],
        "scan": lambda row: row[:24].mean() * 255 if row.ndim == 1 else row.mean() * 255,
    }
    aligned = join(settings(records=records), sources)["server"]
    people = dict(zip(aligned.numbers.tolist(), aligned.ids, strict=True))
    rows = [int(people[number][1:]) for number in data.record_numbers.tolist()]
    assert len(rows) == (40 if records == "labelled" else len(set(rows)))
    absent = 0
    for party in data.parties:
        assert party.encoder.shape == tuple(party.features.shape[1:])
        for person, row, key in zip(rows, party.features.numpy(), party.ids, strict=True):
            if key is None:
                absent += 1
                assert row.tolist() == party.encoder.absent_row().tolist()
            else:
                assert int(key[1:]) == person
                assert numbers_of[party.name](row) == pytest.approx(person)
    assert (absent > 0) == (records == "labelled")
    assert [data.classes[int(label)] for label in data.labels] == [("no", "yes")[n % 2] for n in rows]


def test_each_party_alone_sees_what_it_sees_with_all(sources):
    for name, own in join(settings(), sources).items():
        assert own.rows == join(settings(), sources)["server"].rows, name
    everyone = load_tables(settings(), sources, 0)
    digests = {load_tables(settings(), sources, 0, name).record_digest for name in (None, *sources)}
    assert digests == {everyone.record_digest}


def test_the_label_holder_needs_a_table(sources):
    sources["server"] = sources["lab"]
    with pytest.raises(ConfigError, match=r'VFL-2254.*parties\.server\.source.*"arrays"'):
        load_tables(settings(), sources, 0)


def test_a_label_among_the_columns_of_a_series_is_refused(sources, tmp_path):
    (tmp_path / "other").mkdir()
    lines = [(name, 1, 2.0) for name in PEOPLE]
    sources["ward"] = write_series(tmp_path / "other", lines)
    path = tmp_path / "other" / "series.csv"
    path.write_text(path.read_text().replace("id,time,a", "id,time,label"))
    with pytest.raises(DataError, match=r"VFL-2003.*parties\.ward\.source\.ignore"):
        load_tables(settings(), sources, 0)
