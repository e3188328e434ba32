import gzip

import numpy as np
import pytest

from vafl.data.parkinson import load_parkinson
from vafl.errors import DataError

NAMES = ["id", "gender", *(f"f{n}" for n in range(752)), "class"]


@pytest.fixture(scope="module")
def lines():
    """The lines of a file of the original's shape: 252 people with three recordings each."""
    features = (np.random.default_rng(0).integers(0, 1000, (756, 753)) / 1000).tolist()
    return [f"{n // 3},{','.join(map(str, row))},{n // 3 % 2}" for n, row in enumerate(features)]


def write(folder, lines, group_row=False, packed=False, names=NAMES):
    groups = [",".join(["Basic Info", "", *["Baseline Features"] * 752, ""])] if group_row else []
    content = "\n".join([*groups, ",".join(names), *lines]).encode()
    (folder / "parkinson").mkdir()
    path = folder / "parkinson" / ("pd_speech_features.csv.gz" if packed else "pd_speech_features.csv")
    path.write_bytes(gzip.compress(content, compresslevel=1) if packed else content)
    return folder


@pytest.mark.parametrize("group_row", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_whole_people_are_held_out(tmp_path, lines, group_row, packed):
    data = load_parkinson(write(tmp_path, lines, group_row, packed), 0.25, seed=1)
    assert data.train.shape == (567, 753)
    assert data.test.shape == (189, 753)
    people = data.records // 3
    assert not set(people[:567]) & set(people[567:])
    assert sorted(data.records.tolist()) == list(range(756))
    assert data.columns[:2] == ("gender", "f0")
    assert (data.train_labels == people[:567] % 2).all()


def test_the_seed_decides_who_is_held_out(tmp_path, lines):
    folder = write(tmp_path, lines)
    one, again, other = (load_parkinson(folder, 0.25, seed).record_digest for seed in (1, 1, 2))
    assert one == again != other


def test_a_missing_file_says_where_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"UCI Machine Learning Repository \(data set 470\)"):
        load_parkinson(tmp_path, 0.25, 0)


def test_a_cut_file_is_refused(tmp_path, lines):
    with pytest.raises(DataError, match=r"must have 756 rows of 252 people and 755 columns. Found 700 rows"):
        load_parkinson(write(tmp_path, lines[:700]), 0.25, 0)


def test_another_file_is_refused(tmp_path, lines):
    with pytest.raises(DataError, match="must have the columns id and class"):
        load_parkinson(write(tmp_path, lines, packed=True, names=["id", *NAMES[1:-1], "label"]), 0.25, 0)
    path = tmp_path / "parkinson" / "pd_speech_features.csv.gz"
    path.write_bytes(b"\x1f\x8bjunk")
    with pytest.raises(DataError, match="must be a CSV"):
        load_parkinson(tmp_path, 0.25, 0)
