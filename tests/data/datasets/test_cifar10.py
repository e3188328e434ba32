import numpy as np
import pytest
from PIL import Image

from vafl.data.datasets.cifar10 import CLASSES, Edition, load_cifar10
from vafl.errors import DataError

SMALL = Edition(pictures=25, digests={})
NAMES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def records(seed):
    random = np.random.default_rng(seed)
    found = random.integers(0, 256, (25, 3073), dtype=np.uint8)
    found[:, 0] = np.arange(25) % 10
    return found


def write_binary(folder, names=NAMES):
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(names):
        (folder / f"{name}.bin").write_bytes(records(seed).tobytes())


def write_sheets(folder):
    folder.mkdir()
    for seed, name in enumerate(NAMES):
        tiles = records(seed)[:, 1:].reshape(5, 5, 3, 32, 32).transpose(0, 3, 1, 4, 2)
        Image.fromarray(tiles.reshape(160, 160, 3)).save(folder / f"{name}.webp", lossless=True)
    np.save(folder / "train_labels.npy", np.concatenate([records(seed)[:, 0] for seed in range(5)]))
    np.save(folder / "test_labels.npy", records(5)[:, 0])


def test_binary_batches_and_sheets_hold_the_same_pictures(tmp_path):
    write_binary(tmp_path / "binary" / "cifar10" / "cifar-10-batches-bin")
    (tmp_path / "sheets").mkdir()
    write_sheets(tmp_path / "sheets" / "cifar10")
    binary, sheets = (load_cifar10(tmp_path / name, SMALL) for name in ("binary", "sheets"))
    assert binary.features.shape == (150, 3, 32, 32)
    assert np.array_equal(binary.features, sheets.features)
    assert binary.features.max() <= 1
    assert binary.labels.tolist() == sheets.labels.tolist() == [*range(10), *range(10), *range(5)] * 6
    assert binary.tests == 25
    assert binary.classes == CLASSES


def test_another_file_than_the_published_one_is_refused(tmp_path):
    write_binary(tmp_path / "cifar10")
    with pytest.raises(DataError, match=r"VFL-2183.*0000"):
        load_cifar10(tmp_path, Edition(25, {"data_batch_3": "0000"}))
    with pytest.raises(DataError, match=r"VFL-2182.*30,730,000.*bytes.*76,825"):
        load_cifar10(tmp_path)


def test_pickles_are_refused_and_what_is_missing_is_named(tmp_path):
    folder = tmp_path / "cifar10"
    write_binary(folder, NAMES[:5])
    with pytest.raises(DataError, match=r"VFL-2181.*test_batch\.bin"):
        load_cifar10(tmp_path)
    (folder / "test_batch").write_bytes(b"\x80\x02")
    with pytest.raises(DataError, match="VFL-2121"):
        load_cifar10(tmp_path)
