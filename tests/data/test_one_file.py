"""One file whose columns are divided among several parties."""

import numpy as np
import polars as pl
import pytest
import torch

from vafl.config import from_document
from vafl.data.partition import VerticalData
from vafl.errors import ConfigError, DataError
from vafl.run.plan import load_data, make_plan

ROWS = 240


def table():
    """Return a table with text, gaps, dates, an id and a constant. The label depends on two columns."""
    random = np.random.default_rng(0)
    numbers, colours = random.normal(size=ROWS), random.integers(0, 3, ROWS)
    return pl.DataFrame(
        {
            "customer": np.arange(1000, 1000 + ROWS),
            "income": [None if n % 9 == 0 else round(float(x), 3) for n, x in enumerate(numbers)],
            "colour": [("red", "green", "blue")[c] for c in colours],
            "since": [f"2024-{1 + n % 12:02}-{1 + n % 28:02}" for n in range(ROWS)],
            "firm": ["one"] * ROWS,
            "visits": random.integers(0, 50, ROWS),
            "bought": np.where(numbers + colours > 1, "yes", "no"),
        }
    )


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    path = tmp_path_factory.mktemp("one") / "people.csv"
    table().write_csv(path)
    return path


def config(path, document=None, **data):
    given = {"data": {"name": "csv", "path": str(path), "label": "bought", **data}, **(document or {})}
    return from_document(given)


GROUPS = {"partition": {"groups": {"bank": ["income", "since"], "shop": ["colo*", "visits", "firm"]}}}


def load(path, document=GROUPS, **data) -> VerticalData:
    return load_data(config(path, document, **data))


def test_text_gaps_dates_and_constants_are_encoded_as_in_tables(people):
    data = load(people)
    bank, shop = data.parties
    assert bank.encoder.form == "codes"
    assert bank.encoder.names == ["income", "since days", "since weekday", "since month"]
    assert shop.encoder.names == ["colour", "visits"]
    assert data.classes == ("no", "yes")
    assert (data.parts.train, data.parts.validation, data.parts.test) == (168, 24, 48)
    lines = table()[data.record_numbers]
    assert [data.classes[label] for label in data.labels] == lines["bought"].to_list()
    assert ((bank.features[:, 0] < 0).numpy() == lines["income"].is_null().to_numpy()).all()
    assert shop.ids.to_list() == [str(number) for number in data.record_numbers]


def test_a_party_reads_its_own_columns_and_all_agree_on_the_records(people):
    whole = load(people)
    for party in ("server", "bank", "shop"):
        own = load_data(config(people, GROUPS), party)
        assert own.record_digest == whole.record_digest
        assert torch.equal(own.labels, whole.labels) == (party == "server")
        for known, every in zip(own.parties, whole.parties, strict=True):
            assert torch.equal(known.features, every.features) == (known.name == party)
    made = make_plan(config(people, GROUPS), party="bank")
    same = make_plan(config(people, GROUPS)).models[0].state_dict()
    assert all(torch.equal(same[name], value) for name, value in made.models[0].state_dict().items())


def test_parquet_and_other_separators_give_the_same_features(people, tmp_path):
    table().write_csv(tmp_path / "people.txt", separator=";")
    table().write_parquet(tmp_path / "people.parquet")
    first, second, third = (
        load(path) for path in (people, tmp_path / "people.txt", tmp_path / "people.parquet")
    )
    for one, other, last in zip(first.parties, second.parties, third.parties, strict=True):
        assert torch.equal(one.features, other.features)
        assert torch.equal(one.features, last.features)


def test_the_digest_tells_features_and_splits_apart_and_does_not_depend_on_labels(people, tmp_path):
    digests = {load(people).record_digest, load(people, test_fraction=0.3).record_digest}
    changes = {"visits": pl.lit(3) + pl.col("visits"), "bought": pl.col("bought").reverse()}
    for name, values in changes.items():
        table().with_columns(values.alias(name)).write_csv(tmp_path / f"{name}.csv")
        digests.add(load(tmp_path / f"{name}.csv").record_digest)
    assert len(digests) == 3


def test_columns_are_shared_out_evenly_without_groups(people):
    shares = [party.encoder.names for party in load(people, {"partition": {"clients": 3}}).parties]
    assert shares == [["income"], ["colour", "since days", "since weekday", "since month"], ["visits"]]
    with pytest.raises(ConfigError, match=r"VFL-2222.*6.*7"):
        load(people, {"partition": {"clients": 7}})
    with pytest.raises(DataError, match=r"VFL-2201.*client\-1"):
        load(people, {"partition": {"clients": 6}})


def test_a_regression_with_columns_to_ignore(people):
    data = load(people, {}, label="visits", ignore=["cust*", "firm"], task="regression")
    assert data.classes is None
    assert data.labels.dtype == torch.float32
    assert not {"customer", "firm", "visits"} & {name for own in data.parties for name in own.encoder.names}


def test_numbers_are_rounded_to_float32_after_scaling_only(tmp_path):
    """Seconds since 1970 differ by less than float32 can represent."""
    seconds = 1_700_000_000 + (np.arange(40) * 7) % 41 / 2
    pl.DataFrame({"y": np.arange(40) % 2, "seconds": seconds}).write_csv(tmp_path / "a.csv")
    document = {"partition": {"clients": 1}, "embedding": {"model": "linear"}}
    (own,) = load(tmp_path / "a.csv", document, label="y").parties
    assert own.encoder.form == "dense"
    assert len(own.features.unique()) == 40


PRIVATE = {"privacy": {"mode": "release_once", "clip": 1.0, "noise": 1.0, "mu_max": 2.0}}


def test_where_records_are_guaranteed_privacy_the_encoder_is_public(people):
    with pytest.raises(ConfigError, match="VFL-7155"):
        load(people, {**GROUPS, **PRIVATE})
    with pytest.raises(DataError, match=r"VFL-2202.*since.*data"):
        load(people, {**GROUPS, **PRIVATE}, scale="none")
    numbers = {"partition": {"groups": {"bank": ["income"], "shop": ["visits"]}}}
    data = load(people, {**numbers, **PRIVATE}, scale="none")
    expected = table()[data.record_numbers]["income"].fill_null(0.0).to_numpy()
    assert np.allclose(data.parties[0].features[:, 0], expected)


@pytest.mark.parametrize(
    ("text", "settings", "said"),
    [
        ("a,y\n5,0\n3,1\n", {"label": "Y2"}, r"VFL-2083.*Y2"),
        ("a,label\n5,0\n", {"label": "labell"}, r'VFL-2083.*labell.*Did you mean "label"\?'),
        ("a,y\n5,0\n3,1\n", {"ignore": ["b"]}, r"VFL-2084.*data\.ignore.*b"),
        ("a,y\n5,\n3,1\n1,0\n", {}, r"VFL-2213.*one of 0, 1.*1.*y"),
        ("a,y\n1,0\n2,0\n3,0\n4,0\n", {}, r"VFL-2211.*1000.*1"),
        ("a,y\n1,0\n2,1\n", {}, r"VFL-2271.*2"),
        ("a,y\n", {}, "VFL-2223"),
        ("a,y\n1,low\n2,high\n3,low\n", {"task": "regression"}, r"VFL-2213.*a number.*y"),
        ("", {}, "VFL-2091"),
        ("a,y\n1,2,3,4\n", {}, "VFL-2284"),
        ("a,b,y\n1,2,0\n2,2,1\n3,2,0\n5,2,1\n", {}, r"VFL-2201.*client\-2.*b: always 2 in the training rows"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, text, settings, said):
    (tmp_path / "table.csv").write_text(text, encoding="utf-8")
    clients = {"partition": {"clients": text.partition("\n")[0].count(",")}, "stop": {"patience": 0}}
    given = {"label": "y", "test_fraction": 0.25, "validation_fraction": 0.0, **settings}
    with pytest.raises(DataError, match=said):
        load(tmp_path / "table.csv", clients if text else {"stop": {"patience": 0}}, **given)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="VFL-2221"):
        load(tmp_path / "none.csv")


def test_a_weight_is_no_feature_and_nobody_elses_business(people, tmp_path):
    path = tmp_path / "weighted.csv"
    table().with_columns(weight=pl.col("visits") + 0.5).write_csv(path)
    plain, data = load(people, {}), load(path, {}, weight="weight")
    assert [party.encoder.names for party in data.parties] == [party.encoder.names for party in plain.parties]
    assert data.record_digest == plain.record_digest, "others see the digest"
    assert data.weights.tolist() == pytest.approx((table()["visits"] + 0.5)[data.record_numbers].to_list())
    assert load_data(config(path, weight="weight"), "client-1").weights is None
    with pytest.raises(DataError, match=r"VFL-2083.*wait"):
        load(path, {}, weight="wait")
    with pytest.raises(ConfigError, match="VFL-1019"):
        config(path, {"labels": {"epsilon": 1.0}}, weight="weight")
    with pytest.raises(ConfigError, match=r"VFL-2247.*weight.*parties"):
        from_document({"data": {"name": "parties", "parties": ["bank"], "weight": "weight"}})
    with pytest.raises(ConfigError, match="VFL-2253"):
        load(path, {}, weight="bought")
