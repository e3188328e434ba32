import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vafl.data.columns import match_columns
from vafl.data.dataset import Dataset
from vafl.data.partition import partition
from vafl.data.settings import PartitionSettings
from vafl.errors import ConfigError, DataError

COLUMNS = ("age", "pay_1", "pay_2", "limit")


def table(rows=6, columns=COLUMNS):
    features = np.random.default_rng(0).normal(3, 2, (rows, len(columns))).astype(np.float32)
    labels = np.arange(rows) % 2
    return Dataset("table", features, features[:2], labels, labels[:2], columns, ("no", "yes"))


def images(rows=6, shape=(1, 4, 6)):
    features = np.random.default_rng(0).random((rows, *shape)).astype(np.float32)
    labels = np.arange(rows) % 2
    return Dataset("images", features, features[:2], labels, labels[:2], (), ("no", "yes"))


def shapes(data):
    return [tuple(party.train.shape[1:]) for party in data.parties]


@given(st.integers(1, 9), st.data())
def test_equal_shares_deal_every_column_to_exactly_one_party(columns, data):
    clients = data.draw(st.integers(1, columns))
    source = table(columns=tuple(map(str, range(columns))))
    split = partition(source, PartitionSettings(clients=clients), scale="none")
    assert [party.name for party in split.parties] == [f"client-{m}" for m in range(1, clients + 1)]
    assert np.array_equal(torch.cat([party.train for party in split.parties], 1).numpy(), source.train)
    assert np.array_equal(torch.cat([party.test for party in split.parties], 1).numpy(), source.test)
    widths = [party.train.shape[1] for party in split.parties]
    assert max(widths) - min(widths) <= 1
    assert split.rows == 6


def test_groups_by_name_and_pattern():
    source = table()
    settings = PartitionSettings(groups={"bank": ("pay_*", "pay_1"), "shop": ("age",)})
    split = partition(source, settings, scale="none")
    assert [party.name for party in split.parties] == ["bank", "shop"]
    assert np.array_equal(split.parties[0].train.numpy(), source.train[:, [1, 2]])
    assert np.array_equal(split.parties[1].test.numpy(), source.test[:, [0]])
    assert split.classes == ("no", "yes")
    assert split.train_labels.tolist() == [0, 1, 0, 1, 0, 1]


def test_a_name_with_brackets_means_itself():
    assert match_columns(["x[1]", "x1"], {"one": ("x[1]",)}) == {"one": [0]}
    assert match_columns(["xa", "xb"], {"one": ("x[ab]",)}) == {"one": [0, 1]}


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            {"bank": ("pay_*",), "shop": ("pay_2",)},
            r'"pay_2" is claimed by both "bank" and "shop". Take it out',
        ),
        ({"bank": ("limits",)}, r'partition.groups.bank: no column matches "limits". Did you mean "limit"?'),
        ({"bank": ("age",), "shop": ()}, r"partition.groups.shop.* at least one column. Found none"),
        ({"bank": ("zzz",)}, r'no column matches "zzz". Columns: age, pay_1, pay_2, limit'),
    ],
)
def test_groups_that_cannot_be_are_refused(groups, said):
    with pytest.raises(DataError, match=said):
        partition(table(), PartitionSettings(groups=groups))


def test_groups_need_named_columns():
    with pytest.raises(
        ConfigError, match=r"needs a table with named columns. Found images.*Use partition.clients"
    ):
        partition(images(), PartitionSettings(groups={"a": ("x",)}))


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
    split = partition(source, PartitionSettings(clients=2, layout=layout))
    assert shapes(split) == expected
    first = split.parties[0].train.numpy()
    if layout == "bands":
        assert np.array_equal(first, source.train[:, :, :2])
    if layout == "views":
        assert np.array_equal(first, source.train[:, :1])
    if layout == "sequence":
        assert np.array_equal(first, source.train[:, :, :, :3].reshape(6, 8, 3))


def test_series_keep_their_steps_and_are_scaled_over_them():
    features = np.random.default_rng(0).normal(3, 2, (6, 5, 4)).astype(np.float32)
    labels = np.arange(6) % 2
    source = Dataset("series", features, features[:2], labels, labels[:2], COLUMNS, ("no", "yes"))
    named = partition(source, PartitionSettings(groups={"bank": ("pay_*",), "shop": ("age",)}))
    assert shapes(named) == [(5, 2), (5, 1)]
    assert torch.allclose(named.parties[0].train.std((0, 1), correction=0), torch.ones(2))
    shared = partition(source, PartitionSettings(clients=2, layout="sequence"), scale="none")
    assert np.array_equal(shared.parties[1].train.numpy(), features[:, :, 2:])
    with pytest.raises(ConfigError, match=r"at most the 1 views to share out. Found 2"):
        partition(images(), PartitionSettings(clients=2, layout="views"))


def test_a_table_has_no_bands():
    with pytest.raises(
        ConfigError, match=r'layout = "bands" needs images. Found a table. Use layout = "columns"'
    ):
        partition(table(), PartitionSettings(layout="bands"))


def test_there_are_at_most_as_many_clients_as_columns():
    with pytest.raises(ConfigError, match=r"at most the 4 columns to share out. Found 5"):
        partition(table(), PartitionSettings(clients=5))
    with pytest.raises(ConfigError, match=r"partition.clients must be 1 or more. Found 0"):
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
    split = partition(source, PartitionSettings(clients=2), scale)
    means = torch.cat([party.train.flatten(1) for party in split.parties], 1).mean(0)
    assert bool((means.abs() < 1e-5).all()) is standard


def test_bytes_are_those_of_the_features():
    split = partition(table(rows=6), PartitionSettings(clients=2))
    assert split.nbytes == (6 + 2) * 4 * 4
    assert all(party.train.is_contiguous() and party.train.dtype == torch.float32 for party in split.parties)
