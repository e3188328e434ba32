"""Tables as one vertical data set: what each party reads, how rows match, and what is refused."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch

from tests.companies import configuration, write_companies
from vafl.data.aligned import join, load_tables
from vafl.data.alignment.rows import Alignment
from vafl.errors import ConfigError, DataError
from vafl.run.plan import make_plan


@pytest.fixture
def folder(tmp_path):
    write_companies(tmp_path)
    return tmp_path


def load(config, party=None):
    return load_tables(config.data, config.sources, config.seed, party)


def align(config):
    for name, own in join(config.data, config.sources).items():
        own.write(Path(config.sources[name].alignment))


def test_a_join_gives_every_party_the_same_rows(folder):
    config = configuration(folder)
    files = {"bank": pl.read_csv(folder / "bank.csv"), "shop": pl.read_parquet(folder / "shop.parquet")}
    common = set(files["bank"]["person"]) & set(files["shop"]["person"])
    found = join(config.data, config.sources)
    assert set(found["server"].ids) == common
    assert all(own.ids.to_list() == found["server"].ids.to_list() for own in found.values())
    labelled = join(replace(config.data, records="labelled"), config.sources)
    assert labelled["server"].rows == 400
    assert set(labelled["bank"].ids) == set(files["bank"]["person"])
    assert len({own.token for own in labelled.values()}) == 1


@pytest.mark.parametrize("records", ["common", "labelled"])
def test_features_and_labels_are_those_of_the_same_person(folder, records):
    config = configuration(folder, data={"records": records, "validation_fraction": 0.1, "scale": "none"})
    data, found = load(config), join(config.data, config.sources)
    assert data.parts.validation == round(0.1 * found["server"].rows)
    person_of = dict(zip(found["server"].numbers.tolist(), found["server"].ids, strict=True))
    people = [person_of[number] for number in data.record_numbers.tolist()]
    bank = pl.read_csv(folder / "bank.csv").rows_by_key("person", named=True, unique=True)
    labels = pl.read_csv(folder / "labels.csv").rows_by_key("person", named=True, unique=True)
    party = data.parties[0]
    for person, row, label in zip(people, party.features, data.labels, strict=True):
        assert data.classes[int(label)] == labels[person]["repaid"]
        if person in bank:
            assert row[:2].tolist() == pytest.approx([bank[person]["income"], bank[person]["age"]])
        else:
            assert row.tolist() == party.encoder.absent_row().tolist()
    assert (records == "labelled") == any(person not in bank for person in people)


@pytest.mark.parametrize("records", ["common", "labelled"])
def test_the_label_holder_knows_whom_each_client_lacks_and_clients_know_themselves(folder, records):
    config = configuration(folder, data={"records": records})
    everybody, seen = load(config), load(config, "server")
    for own, known in zip(everybody.parties, seen.parties, strict=True):
        assert known.ids.to_list() == own.ids.to_list()
        assert own.ids.has_nulls() == (records == "labelled")
    assert [party.ids is None for party in load(config, "bank").parties] == [False, True]


def test_a_party_reads_its_own_table_only_and_all_agree_on_the_records(folder):
    config = configuration(folder)
    align(config)
    whole = load(config)
    digests = {whole.record_digest}
    for party, own in (("server", "labels.csv"), ("bank", "bank.csv"), ("shop", "shop.parquet")):
        hidden = folder / f"hidden-{party}"
        hidden.mkdir()
        others = [path for path in folder.iterdir() if path.suffix in (".csv", ".parquet")]
        for path in others:
            if path.name not in (own, f"{party}.alignment.parquet"):
                path.rename(hidden / path.name)
        data = load(configuration(folder, party), party)
        digests.add(data.record_digest)
        assert data.rows == whole.rows
        for index, name in enumerate(("bank", "shop")):
            same = torch.equal(data.parties[index].features, whole.parties[index].features)
            assert same == (name == party)
            assert data.parties[index].features.shape[1] > 0 or name != party
        assert torch.equal(data.labels, whole.labels) == (party == "server")
        for path in hidden.iterdir():
            path.rename(folder / path.name)
    assert len(digests) == 1
    plan = make_plan(configuration(folder, "bank"), party="bank")
    first = make_plan(config).models[0].state_dict()
    assert all(torch.equal(first[key], value) for key, value in plan.models[0].state_dict().items())


def test_other_fractions_or_parties_are_other_records_to_agree_on(folder):
    align(configuration(folder))
    sections = [{}, {"test_fraction": 0.3}, {"validation_fraction": 0.2}, {"parties": ["shop", "bank"]}]
    assert len({load(configuration(folder, data=own)).record_digest for own in sections}) == 4


def test_the_label_is_no_feature_of_the_label_holders_own_client(folder):
    same = {"path": str(folder / "labels.csv"), "id": "person"}
    labels = pl.read_csv(folder / "labels.csv")
    labels.with_columns(x=pl.int_range(labels.height) % 71).write_csv(folder / "labels.csv")
    tables = {"server": {**same, "label": "repaid"}, "bank": same}
    config = configuration(folder, "bank", data={"parties": ["bank"]}, tables=tables)
    assert load(config).parties[0].encoder.names == ["x"]


def test_a_clients_copy_of_the_label_is_refused_by_its_name(folder):
    bank = pl.read_csv(folder / "bank.csv")
    bank.join(pl.read_csv(folder / "labels.csv"), on="person").write_csv(folder / "bank.csv")
    config = configuration(folder)
    align(config)
    for party in (None, "bank"):
        with pytest.raises(DataError, match=r"VFL-2003.*repaid.*parties\.bank\.source"):
            load(config, party)
    ignoring = replace(config.sources["bank"], ignore=("repaid",))
    assert load_tables(config.data, {**config.sources, "bank": ignoring}, 0).parties[0].encoder


def test_what_does_not_fit_together_is_said(folder):
    config = configuration(folder, "bank")
    with pytest.raises(DataError, match="VFL-2057"):
        load(config, "bank")
    with pytest.raises(ConfigError, match=r"VFL-2007.*server"):
        load(config)
    with pytest.raises(DataError, match=r"VFL-2006.*thief"):
        load(config, "thief")
    with pytest.raises(ConfigError, match=r"VFL-1016.*thief"):
        configuration(folder, tables={"thief": {"path": "a", "id": "b"}})
    with pytest.raises(ConfigError, match=r"VFL-1015.*bank.*b"):
        configuration(folder, tables={"bank": {"path": "", "id": "b"}})
    with pytest.raises(ConfigError, match=r"VFL-1017.*server"):
        configuration(folder, tables={"bank": {"path": "a", "id": "b", "label": "c"}})
    with pytest.raises(ConfigError, match=r"VFL-2242.*data\.parties"):
        configuration(folder, data={"parties": ["bank", "bank"]})
    labelled = configuration(folder, data={"records": "labelled"})
    align(labelled)
    with pytest.raises(DataError, match="VFL-2011"):
        load(configuration(folder))
    with pytest.raises(DataError, match="VFL-2008"):
        load(configuration(folder, data={"records": "labelled", "task": "regression"}))
    own = Alignment.read(folder / "bank.alignment.parquet")
    replace(own, token="0" * 32).write(folder / "bank.alignment.parquet")
    with pytest.raises(DataError, match="VFL-2009"):
        load(labelled)


def test_the_server_refuses_rows_that_a_client_lacks_before_any_client_does(folder):
    align(configuration(folder, data={"records": "labelled"}))
    with pytest.raises(DataError, match="VFL-2011"):
        load(configuration(folder, data={"records": "common"}), "server")


def test_labels_that_cannot_be_learnt_are_refused(folder):
    text = (folder / "labels.csv").read_text()
    cases = [
        (text.replace("yes", "no"), {}, r"VFL-2211.*1000.*1"),
        (text.replace("yes", ""), {}, r"VFL-2211.*1"),
        (text.replace("yes", "?", 150).replace("?", "yes", 140), {}, "VFL-2213"),
        (text, {"task": "regression"}, r"VFL-2213.*a number"),
    ]
    for content, data, message in cases:
        (folder / "labels.csv").write_text(content)
        with pytest.raises(DataError, match=message):
            load(configuration(folder, data={"records": "labelled", **data}))
    (folder / "bank.csv").write_text("person,income\n1,2\n")
    (folder / "labels.csv").write_text(text)
    with pytest.raises(DataError, match="VFL-2013"):
        load(configuration(folder))
    with pytest.raises(DataError, match=r"VFL-2002.*bank"):
        load(configuration(folder, data={"records": "labelled"}))


def test_regression_labels_are_numbers(folder):
    labels = pl.read_csv(folder / "labels.csv")
    labels.with_columns(repaid=pl.int_range(labels.height) / 4).write_csv(folder / "labels.csv")
    data = load(configuration(folder, data={"task": "regression"}))
    assert data.classes is None
    assert data.labels[data.train].dtype == torch.float32
    assert float(data.labels[data.train].max()) > 90


# --- weights ---


def weighted(folder, weights, **sections):
    """Return a configuration whose label table has a column of weights."""
    labels = pl.read_csv(folder / "labels.csv").select("person", "repaid")
    labels.with_columns(pl.Series("weight", weights)).write_csv(folder / "labels.csv")
    tables = {name: vars(own) for name, own in configuration(folder).sources.items()}
    tables["server"] = {**tables["server"], "weight": "weight"}
    return configuration(folder, tables=tables, **sections)


def test_weights_are_those_of_the_same_person_and_no_feature(folder):
    config = weighted(folder, [number / 7 for number in range(400)])
    data, found = load(config), join(config.data, config.sources)
    assert [party.name for party in data.parties] == ["bank", "shop"]
    by_person = pl.read_csv(folder / "labels.csv").rows_by_key("person", named=True, unique=True)
    person_of = dict(zip(found["server"].numbers.tolist(), found["server"].ids, strict=True))
    expected = [by_person[person_of[number]]["weight"] for number in data.record_numbers.tolist()]
    assert data.weights.tolist() == pytest.approx(expected)
    assert load(config, "server").weights.tolist() == data.weights.tolist()
    assert load(config, "bank").weights is None
    weights = make_plan(config).weights
    own = torch.tensor(expected)[data.train]
    assert weights == pytest.approx((own / own.mean()).numpy(), rel=1e-5)


def test_the_label_holders_own_client_does_not_use_the_weight(folder):
    config = weighted(folder, [1.5] * 400)
    bank = replace(config.sources["bank"], path=config.sources["server"].path)
    with pytest.raises(DataError, match="VFL-2201"):
        load(config.with_sources({"bank": bank}))


@pytest.mark.parametrize(
    ("value", "found"),
    [(None, "None"), ("much", "'much'"), ("-1", "'-1'"), ("inf", "'inf'"), ("NaN", "'NaN'")],
)
def test_weights_that_are_no_weights_are_refused(folder, value, found):
    config = weighted(folder, ["1"] * 399 + [value], data={"records": "labelled"})
    with pytest.raises(DataError, match=rf'Found 1 .* {found} in "weight"'):
        load(config)


def test_weights_that_cannot_be_used_are_refused(folder):
    with pytest.raises(DataError, match="VFL-2004"):
        load(weighted(folder, [0] * 400))
    config = weighted(folder, [1] * 400)
    with pytest.raises(ConfigError, match=r"VFL-1019.*weight"):
        replace(config, labels=replace(config.labels, epsilon=1.0))
    tables = {name: vars(own) for name, own in config.sources.items()}
    for own, said in (
        ({"server": {**tables["server"], "weight": "repaid"}}, "the label"),
        ({"bank": {**tables["bank"], "weight": "age"}}, r"parties\.bank"),
    ):
        with pytest.raises(ConfigError, match=said):
            configuration(folder, tables={**tables, **own})
    missing = {**tables, "server": {**tables["server"], "weight": "wait"}}
    with pytest.raises(DataError, match=r"VFL-2083.*wait"):
        load(configuration(folder, tables=missing))
