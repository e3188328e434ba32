import gzip
import hashlib

import numpy as np
import pytest

from vafl.data import public
from vafl.data.public import load, read_idx
from vafl.data.settings import DataSettings
from vafl.errors import ConfigError, DataError

# --- data sets of scikit-learn ---


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("digits", (1797, 1, 8, 8), 10),
        ("breast_cancer", (569, 30), 2),
        ("wine", (178, 13), 3),
        ("iris", (150, 4), 3),
        ("diabetes", (442, 10), 0),
    ],
)
def test_sets_that_need_no_file(name, shape, classes):
    found = load(DataSettings(name=name))
    assert found.features.shape == shape
    assert found.features.dtype == np.float32
    assert len(found.classes or ()) == classes
    assert len(found.columns) == (0 if name == "digits" else shape[1])
    assert found.labels.dtype == (np.int64 if classes else np.float32)


def test_digits_are_images_in_0_to_1():
    features = load(DataSettings(name="digits")).features
    assert (features.min(), features.max()) == (0, 1)


# --- idx files ---


def idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def mnist(folder, name="mnist", labels=6):
    (folder / name).mkdir()
    images = np.arange(6 * 4).reshape(6, 2, 2) * 10
    for part, count in (("train", 6), ("t10k", 3)):
        idx(folder / name / f"{part}-images-idx3-ubyte.gz", images[:count])
        idx(folder / name / f"{part}-labels-idx1-ubyte.gz", np.arange(min(count, labels)))


@pytest.mark.parametrize("how", ["setting", "environment"])
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_public_sets_lie_in_the_data_folder(tmp_path, monkeypatch, how, name):
    mnist(tmp_path, name)
    if how == "environment":
        monkeypatch.setenv("VAFL_DATA", str(tmp_path))
    found = load(DataSettings(name=name, folder=str(tmp_path) if how == "setting" else ""))
    assert found.features.shape == (9, 1, 2, 2)
    assert found.tests == 3
    assert found.features[5, 0, 1, 1] == pytest.approx(230 / 255)
    assert found.labels.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert len(found.classes) == 10


def test_a_public_set_that_is_not_there_says_what_is_missing(tmp_path):
    mnist(tmp_path)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"VFL-2181.*MNIST.*t10k\-labels\-idx1\-ubyte\.gz"):
        load(DataSettings(name="mnist", folder=str(tmp_path)))
    with pytest.raises(DataError, match=r"VFL-2181.*Fashion\-MNIST"):
        load(DataSettings(name="fashion_mnist", folder=str(tmp_path)))


def test_fashion_in_the_folder_of_mnist_is_told_by_its_digest(tmp_path, monkeypatch):
    mnist(tmp_path)
    content = (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").read_bytes()
    digest = hashlib.md5(content).hexdigest()
    monkeypatch.setattr(public, "_IDX_OF", {digest: "fashion_mnist"})
    with pytest.raises(DataError, match=r"VFL-2261.*MNIST.*Fashion\-MNIST"):
        load(DataSettings(name="mnist", folder=str(tmp_path)))


def test_images_and_labels_that_do_not_belong_together(tmp_path):
    mnist(tmp_path, labels=2)
    with pytest.raises(DataError, match=r"VFL-2101.*9.*4"):
        load(DataSettings(name="mnist", folder=str(tmp_path)))


WHOLE = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + b"abcdef"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(WHOLE[:-1], mtime=0), r"VFL-2264.*\(2, 3\).*17"),
        (gzip.compress(WHOLE + b"!", mtime=0), r"VFL-2264.*\(2, 3\).*19"),
        (
            gzip.compress(WHOLE[:9], mtime=0),
            r"VFL-2263.*000008020000000200",
        ),
        (gzip.compress(WHOLE[:3], mtime=0), r"VFL-2263.*000008"),
        (gzip.compress(b"", mtime=0), "VFL-2263"),
        (
            gzip.compress(b"\0\0\x0d\x01" + WHOLE[4:], mtime=0),
            "VFL-2263",
        ),
        (gzip.compress(WHOLE, mtime=0)[:-9], "VFL-2262"),
        (b"<html>not found</html>", "VFL-2262"),
        (gzip.compress(bytes([0, 0, 8, 4]) + b"\xff" * 16), "VFL-2264"),
    ],
    ids=[
        "truncated",
        "too long",
        "truncated header",
        "no axes",
        "empty",
        "floats",
        "cut gzip",
        "html",
        "huge",
    ],
)
def test_a_damaged_idx_file(tmp_path, content, said):
    (tmp_path / "x.gz").write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_idx(tmp_path / "x.gz")


def test_a_whole_idx_file(tmp_path):
    (tmp_path / "x.gz").write_bytes(gzip.compress(WHOLE))
    assert read_idx(tmp_path / "x.gz").tolist() == [[97, 98, 99], [100, 101, 102]]


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "digit"}, r'VFL-2243.*digit.* Did you mean "digits"\?'),
        ({"name": "zzzzzz"}, r"VFL-2243.*zzzzzz"),
        ({"test_fraction": 0.0}, r"VFL-2244.*0\.0"),
        ({"test_fraction": 1.0}, r"VFL-2244.*1\.0"),
        ({"test_fraction": float("nan")}, r"VFL-2244.*nan"),
        ({"name": "csv"}, "VFL-2246"),
        ({"name": "csv", "path": "x.csv"}, r"VFL-2246.*x\.csv"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        DataSettings(**settings)
