from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vafl.data.columns import match_columns
from vafl.data.dataset import Dataset
from vafl.data.partition import partition
from vafl.data.settings import DataSettings, PartitionSettings
from vafl.data.split import Parts, Split
from vafl.errors import ConfigError, DataError

COLUMNS = ("age", "pay_1", "pay_2", "limit")


def table(rows=8, columns=COLUMNS):
    features = np.random.default_rng(0).normal(3, 2, (rows, len(columns))).astype(np.float32)
    labels = np.arange(rows) % 2
    return Dataset("table", features, labels, columns, ("no", "yes"), tests=2)


def images(rows=8, shape=(1, 4, 6)):
    features = np.random.default_rng(0).random((rows, *shape)).astype(np.float32)
    labels = np.arange(rows) % 2
    return Dataset("images", features, labels, (), ("no", "yes"), tests=2)


def share_out(source, settings, scale="auto"):
    return partition(source, Split.of_dataset(source, DataSettings(), 0), settings, scale)


def shapes(data):
    return [tuple(party.features.shape[1:]) for party in data.parties]


@given(st.integers(1, 9), st.data())
def test_equal_shares_deal_every_column_to_exactly_one_party(columns, data):
    clients = data.draw(st.integers(1, columns))
    source = table(columns=tuple(map(str, range(columns))))
    split = share_out(source, PartitionSettings(clients=clients), scale="none")
    assert [party.name for party in split.parties] == [f"client-{m}" for m in range(1, clients + 1)]
    assert np.array_equal(torch.cat([party.features for party in split.parties], 1).numpy(), source.features)
    widths = [party.features.shape[1] for party in split.parties]
    assert max(widths) - min(widths) <= 1
    assert split.rows == 6


def test_groups_by_name_and_pattern():
    source = table()
    settings = PartitionSettings(groups={"bank": ("pay_*", "pay_1"), "shop": ("age",)})
    split = share_out(source, settings, scale="none")
    assert [party.name for party in split.parties] == ["bank", "shop"]
    assert np.array_equal(split.parties[0].features.numpy(), source.features[:, [1, 2]])
    assert np.array_equal(split.parties[1].features[split.test].numpy(), source.features[6:, [0]])
    assert split.classes == ("no", "yes")
    assert split.labels[split.train].tolist() == [0, 1, 0, 1, 0, 1]


def test_a_name_with_brackets_means_itself():
    assert match_columns(["x[1]", "x1"], {"one": ("x[1]",)}) == {"one": [0]}
    assert match_columns(["xa", "xb"], {"one": ("x[ab]",)}) == {"one": [0, 1]}


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            {"bank": ("pay_*",), "shop": ("pay_2",)},
            r"VFL-2082.*pay_2.*bank.*shop",
        ),
        ({"bank": ("limits",)}, r'VFL-2084.*partition\.groups\.bank.*limits.* Did you mean "limit"\?'),
        ({"bank": ("age",), "shop": ()}, r"VFL-2081.*partition\.groups\.shop"),
        ({"bank": ("zzz",)}, r"VFL-2084.*zzz"),
    ],
)
def test_groups_that_cannot_be_are_refused(groups, said):
    with pytest.raises(DataError, match=said):
        share_out(table(), PartitionSettings(groups=groups))


def test_groups_need_named_columns():
    with pytest.raises(ConfigError, match=r"VFL-2233.*images"):
        share_out(images(), PartitionSettings(groups={"a": ("x",)}))


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("columns", [(24,), (24,)]),
        ("bands", [(2, 2, 6), (2, 2, 6)]),
        ("views", [(1, 4, 6), (1, 4, 6)]),
        ("sequence", [(8, 3), (8, 3)]),
    ],
)
def test_layouts_of_images(layout, expected):
    source = images(shape=(2, 4, 6))
    split = share_out(source, PartitionSettings(clients=2, layout=layout))
    assert shapes(split) == expected
    first = split.parties[0].features.numpy()
    if layout == "bands":
        assert np.array_equal(first, source.features[:, :, :2])
    if layout == "views":
        assert np.array_equal(first, source.features[:, :1])
    if layout == "sequence":
        assert np.array_equal(first, source.features[:, :, :, :3].reshape(8, 8, 3))


def test_series_keep_their_steps_and_are_scaled_over_them():
    features = np.random.default_rng(0).normal(3, 2, (8, 5, 4)).astype(np.float32)
    source = Dataset("series", features, np.arange(8) % 2, COLUMNS, ("no", "yes"), tests=2)
    named = share_out(source, PartitionSettings(groups={"bank": ("pay_*",), "shop": ("age",)}))
    assert shapes(named) == [(5, 2), (5, 1)]
    assert torch.allclose(named.parties[0].features[named.train].std((0, 1), correction=0), torch.ones(2))
    shared = share_out(source, PartitionSettings(clients=2, layout="sequence"), scale="none")
    assert np.array_equal(shared.parties[1].features.numpy(), features[:, :, 2:])
    with pytest.raises(ConfigError, match=r"VFL-2232.*1.*views.*2"):
        share_out(images(), PartitionSettings(clients=2, layout="views"))


def test_a_table_has_no_bands():
    with pytest.raises(ConfigError, match=r"VFL-2234.*bands"):
        share_out(table(), PartitionSettings(layout="bands"))


def test_there_are_at_most_as_many_clients_as_columns():
    with pytest.raises(ConfigError, match=r"VFL-2232.*4.*columns.*5"):
        share_out(table(), PartitionSettings(clients=5))
    with pytest.raises(ConfigError, match=r"VFL-2249.*0"):
        PartitionSettings(clients=0)


@pytest.mark.parametrize(
    ("source", "scale", "standard"),
    [
        (table(), "auto", True),
        (table(), "standard", True),
        (table(), "none", False),
        (images(), "auto", False),
        (images(), "standard", True),
    ],
    ids=lambda value: value.name if isinstance(value, Dataset) else str(value),
)
def test_tables_are_standardised_and_images_left(source, scale, standard):
    split = share_out(source, PartitionSettings(clients=2), scale)
    means = torch.cat([party.features[split.train].flatten(1) for party in split.parties], 1).mean(0)
    assert bool((means.abs() < 1e-5).all()) is standard


def test_bytes_are_those_of_the_features():
    split = share_out(table(rows=8), PartitionSettings(clients=2))
    assert split.nbytes == (6 + 2) * 4 * 4
    assert all(
        party.features.is_contiguous() and party.features.dtype == torch.float32 for party in split.parties
    )


def test_parts_are_slices_of_one_tensor():
    data = share_out(table(), PartitionSettings(clients=1))
    watched = replace(data, parts=Parts(4, 2, 2))
    features = data.parties[0].features
    assert features[data.train].data_ptr() == features.data_ptr()
    assert (data.train, data.validation, data.test) == (slice(0, 6), slice(6, 6), slice(6, 8))
    assert (watched.train, watched.validation, watched.test) == (slice(0, 4), slice(4, 6), slice(6, 8))
    assert (data.held_out, watched.held_out) == (data.test, watched.validation)
    assert replace(data, parts=Parts(8)).held_out == slice(0, 8)


def test_training_labels_of_one_class_are_refused():
    source = replace(table(), labels=np.array([1] * 6 + [0, 0]))
    with pytest.raises(DataError, match=r"VFL-2231.*table.*yes"):
        share_out(source, PartitionSettings())
    assert share_out(replace(source, classes=None), PartitionSettings()).classes is None
