import gzip

import numpy as np
import pytest

from vafl.data.datasets.parkinson import load_parkinson
from vafl.data.settings import DataSettings
from vafl.data.split import Parts, Split
from vafl.errors import DataError

NAMES = ["id", "gender", *(f"f{n}" for n in range(752)), "class"]


@pytest.fixture(scope="module")
def lines():
    """Return the lines of a file like the original: 252 people with three recordings each."""
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
    shuffled = [lines[n] for n in np.random.default_rng(0).permutation(756)]
    data = load_parkinson(write(tmp_path, shuffled, group_row, packed))
    assert data.features.shape == (756, 753)
    assert data.columns[:2] == ("gender", "f0")
    assert (data.labels == np.arange(756) // 3 % 2).all()
    settings = DataSettings("parkinson", test_fraction=0.25, validation_fraction=0.1)
    split = Split.of_dataset(data, settings, seed=1)
    assert split.parts == Parts(492, 75, 189)
    people = [set(split.order[part] // 3) for part in split.parts.slices.values()]
    assert [len(own) * 3 for own in people] == [492, 75, 189]
    assert len(set.union(*people)) == 252


def test_a_missing_file_says_where_to_get_it(tmp_path):
    with pytest.raises(DataError, match="VFL-2181"):
        load_parkinson(tmp_path)


def test_a_cut_file_is_refused(tmp_path, lines):
    with pytest.raises(DataError, match=r"VFL-2161.*756.*252.*3.*755.*700"):
        load_parkinson(write(tmp_path, lines[:700]))


def test_another_file_is_refused(tmp_path, lines):
    with pytest.raises(DataError, match=r"VFL-2163.*class"):
        load_parkinson(write(tmp_path, lines, packed=True, names=["id", *NAMES[1:-1], "label"]))
    path = tmp_path / "parkinson" / "pd_speech_features.csv.gz"
    path.write_bytes(b"\x1f\x8bjunk")
    with pytest.raises(DataError, match="VFL-2162"):
        load_parkinson(tmp_path)
