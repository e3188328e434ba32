import gzip
import hashlib

import numpy as np
import pytest
import torch

from vafl.data import sources
from vafl.data.partition import partition
from vafl.data.settings import DataSettings, PartitionSettings
from vafl.data.sources import load, read_idx
from vafl.errors import ConfigError, DataError

# --- sets that scikit-learn carries ---


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("digits", (1348, 1, 8, 8), 10),
        ("breast_cancer", (427, 30), 2),
        ("wine", (134, 13), 3),
        ("iris", (112, 4), 3),
        ("diabetes", (332, 10), 0),
    ],
)
def test_sets_that_need_no_file(name, shape, classes):
    found = load(DataSettings(name=name), seed=3)
    assert found.train.shape == shape
    assert found.train.dtype == np.float32
    assert len(found.classes or ()) == classes
    assert len(found.columns) == (0 if name == "digits" else shape[1])
    assert found.train_labels.dtype == (np.int64 if classes else np.float32)


def test_digits_are_images_in_0_to_1():
    found = load(DataSettings(name="digits", test_fraction=0.5), seed=0)
    assert (found.train.min(), found.train.max()) == (0, 1)
    assert abs(len(found.train) - len(found.test)) <= 1


def test_the_seed_decides_the_test_rows():
    one, again, other = (load(DataSettings(name="iris"), seed) for seed in (1, 1, 2))
    assert np.array_equal(one.test, again.test)
    assert not np.array_equal(one.test, other.test)


# --- CSV ---


def csv(folder, text, **settings):
    path = folder / "table.csv"
    path.write_text(text, encoding="utf-8")
    return load(DataSettings(name="csv", path=str(path), **{"label": "y", **settings}), seed=0)


def lines(header, count, line):
    return (
        header
        + "\n"
        + "".join(line.format(i=i, half=i / 2, odd=i % 2, word="ab"[i % 2]) + "\n" for i in range(count))
    )


def test_a_csv_of_numbers_and_truth_values(tmp_path):
    found = csv(tmp_path, "a,b,flag,y\n" + "1,0.5,true,yes\n2,1.5,false,no\n" * 4)
    assert found.columns == ("a", "b", "flag")
    assert found.classes == ("no", "yes")
    assert (len(found.train), len(found.test)) == (6, 2)
    expected = np.array([[2, 1.5, 0], [1, 0.5, 1]], dtype=np.float32)
    assert np.array_equal(found.train, expected[found.train_labels])


def test_a_csv_s_numbers_are_rounded_to_float32_after_scaling_only(tmp_path):
    """Seconds since 1970 differ by less than float32 has there: they were all one."""
    found = csv(tmp_path, lines("seconds,y", 40, "17000000{i:02},{odd}"))
    own = partition(found, PartitionSettings(clients=1)).parties[0].train
    assert own.dtype == torch.float32
    assert len(own.unique()) == len(own)


def test_a_csv_for_regression_with_columns_to_ignore(tmp_path):
    text = lines("name,a,y", 8, "{word},{i},{half}")
    found = csv(tmp_path, text, ignore=("name",), task="regression")
    assert found.columns == ("a",)
    assert found.classes is None
    assert np.allclose(found.train[:, 0] / 2, found.train_labels)


NUMBERS = lines("a,y", 8, "{i},{odd}")


@pytest.mark.parametrize(
    ("text", "settings", "said"),
    [
        (
            lines("a,w,y", 8, "{i},{word},{odd}"),
            {},
            r"features must be numbers. Found text in w. Encode .* or list them in data.ignore",
        ),
        (NUMBERS, {"label": "Y2"}, r'has no column "Y2". Its columns: a, y'),
        (
            lines("a,label", 8, "{i},{odd}"),
            {"label": "labell"},
            r'has no column "labell". Did you mean "label"\?',
        ),
        (NUMBERS, {"ignore": ("b",)}, r'has no column "b"'),
        ("a,y\n1,\n2,1\n", {}, r'label column "y" has missing values. Drop those rows'),
        ("a,b,y\n1,2,0\n,3,1\n4,5,0\n6,7,1\n", {}, r"Found NaN or infinity in 1 column\(s\): a"),
        ("a,y\n1,0\n2,0\n3,0\n4,0\n", {}, r'at least two classes. Found only "0"'),
        ("a,y\n1,0\n2,1\n", {}, r"both needed. Found 2 and 0"),
        (
            "a,y\n1,low\n2,high\n3,low\n4,low\n",
            {"task": "regression"},
            r"label of a regression must be a number",
        ),
        ("", {}, r"must be a CSV in UTF-8, with a header line"),
        ("a,y\n1,2,3,4\n", {}, r"must be a CSV in UTF-8, with a header line"),
    ],
)
def test_a_csv_that_cannot_be_used_says_why(tmp_path, text, settings, said):
    with pytest.raises(DataError, match=said):
        csv(tmp_path, text, **settings)


def test_a_csv_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r'data.path must be a CSV file. Found nothing at ".*none.csv"'):
        load(DataSettings(name="csv", path=str(tmp_path / "none.csv"), label="y"), 0)


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
    found = load(DataSettings(name=name, folder=str(tmp_path) if how == "setting" else ""), 0)
    assert found.train.shape == (6, 1, 2, 2)
    assert found.test.shape == (3, 1, 2, 2)
    assert found.train[5, 0, 1, 1] == pytest.approx(230 / 255)
    assert found.train_labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(found.classes) == 10


def test_a_public_set_that_is_not_there_says_what_is_missing(tmp_path):
    mnist(tmp_path)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(
        DataError, match=r"MNIST must lie in .* Missing: t10k-labels-idx1-ubyte.gz. Get .* VAFL_DATA"
    ):
        load(DataSettings(name="mnist", folder=str(tmp_path)), 0)
    with pytest.raises(DataError, match=r"Fashion-MNIST must lie in .* Missing: train-images"):
        load(DataSettings(name="fashion_mnist", folder=str(tmp_path)), 0)


def test_fashion_in_the_folder_of_mnist_is_told_by_its_digest(tmp_path, monkeypatch):
    mnist(tmp_path)
    content = (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").read_bytes()
    digest = hashlib.md5(content).hexdigest()
    monkeypatch.setattr(sources, "_IDX_OF", {digest: "fashion_mnist"})
    with pytest.raises(
        DataError, match=r"must be MNIST's. Found Fashion-MNIST's. Put it into the folder fashion"
    ):
        load(DataSettings(name="mnist", folder=str(tmp_path)), 0)


def test_images_and_labels_that_do_not_belong_together(tmp_path):
    mnist(tmp_path, labels=2)
    with pytest.raises(DataError, match=r"one label a row is needed. Found 6 rows and 2 labels"):
        load(DataSettings(name="mnist", folder=str(tmp_path)), 0)


WHOLE = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + b"abcdef"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(WHOLE[:-1], mtime=0), r"must hold \(2, 3\) bytes. Found 17 in all. Download it again"),
        (gzip.compress(WHOLE + b"!", mtime=0), r"must hold \(2, 3\) bytes. Found 19"),
        (
            gzip.compress(WHOLE[:9], mtime=0),
            r"must be an idx file of bytes. Found a header 000008020000000200",
        ),
        (gzip.compress(WHOLE[:3], mtime=0), r"Found a header 000008\."),
        (gzip.compress(b"", mtime=0), r"must be an idx file"),
        (
            gzip.compress(b"\0\0\x0d\x01" + WHOLE[4:], mtime=0),
            r"must be an idx file of bytes. Found a header 00000d01",
        ),
        (gzip.compress(WHOLE, mtime=0)[:-9], r"must be a gzip file.*Download it again"),
        (b"<html>not found</html>", r"must be a gzip file"),
        (gzip.compress(bytes([0, 0, 8, 4]) + b"\xff" * 16), r"must hold \(4294967295, "),
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
        ({"name": "digit"}, r'data.name must be one of digits, .*Found "digit". Did you mean "digits"\?'),
        ({"name": "zzzzzz"}, r'Found "zzzzzz".$'),
        ({"test_fraction": 0.0}, r"data.test_fraction must be between 0 and 1. Found 0.0"),
        ({"test_fraction": 1.0}, r"Found 1.0"),
        ({"test_fraction": float("nan")}, r"Found nan"),
        ({"name": "csv"}, r'needs data.path .* and data.label .*Found path "", label ""'),
        ({"name": "csv", "path": "x.csv"}, r'Found path "x.csv", label ""'),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        DataSettings(**settings)
