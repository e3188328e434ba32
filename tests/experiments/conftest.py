import gzip

import numpy as np
import pytest


def write_idx(path, values):
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    """Write files like MNIST's: ten sparse patterns with noise."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "mnist").mkdir()
    generator = np.random.default_rng(0)
    patterns = 200 * (generator.uniform(size=(10, 28, 28)) < 0.1)
    for part, rows in (("train", 1200), ("t10k", 300)):
        labels = generator.integers(0, 10, rows)
        images = (patterns[labels] + generator.uniform(0, 55, (rows, 28, 28))).astype(np.uint8)
        write_idx(folder / "mnist" / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(folder / "mnist" / f"{part}-labels-idx1-ubyte.gz", labels)
    return folder
