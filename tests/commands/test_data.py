"""`vafl init --table` and `vafl data`: from a party's file to a configuration and its features."""

import json
from pathlib import Path

import polars as pl
import pytest
import tomli_w

from tests.companies import document, write_companies
from vafl.cli import main
from vafl.config import read_config

FILES = {"server": "labels.csv", "bank": "bank.csv"}


@pytest.fixture
def folder(tmp_path):
    write_companies(tmp_path)
    return tmp_path


def test_a_company_begins_with_its_file_and_sees_what_becomes_of_it(folder, capsys):
    path = folder / "party.toml"
    options = ["--parties", "bank,shop", "--table", f"bank={folder / 'bank.csv'}", "--out", str(folder)]
    assert main(["init", *options]) == 0
    config = read_config(path)
    assert config.data.parties == ("bank", "shop")
    assert list(config.sources) == ["bank"]
    assert config.sources["bank"].id == "person"
    assert config.sources["bank"].alignment == str(folder / "bank.alignment.parquet")
    capsys.readouterr()
    assert main(["data", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "not aligned yet" in shown
    assert "3 categories:" in " ".join(shown.replace("│", " ").split())
    assert main(["data", str(path), "--json"]) == 0
    (bank,) = json.loads(capsys.readouterr().out)["parties"]
    assert (bank["records"], bank["features"], bank["aligned"]) == (320, 3, False)
    use = {column["name"]: column["use"] for column in bank["columns"]}
    assert use == {"person": "dropped", "income": "number", "age": "number", "job": "category"}


def test_the_label_holder_that_is_a_client_too_says_so_and_learns_from_its_other_columns(
    folder, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    people = pl.read_csv("labels.csv")
    people.with_columns(age=pl.int_range(people.height) % 71).select("person", "age", "repaid").write_csv(
        "l.csv"
    )
    parties = ["--parties", "bank,lender", "--label", "repaid"]
    for name in ("server", "lender"):
        assert main(["init", *parties, "--table", f"{name}=l.csv", "--out", name]) == 0
    assert read_config(Path("lender/party.toml")).sources["lender"].ignore == ("repaid",)
    capsys.readouterr()
    assert main(["data", "lender/party.toml", "--json"]) == 0
    (lender,) = json.loads(capsys.readouterr().out)["parties"]
    assert [own["name"] for own in lender["columns"] if own["features"]] == ["age"]
    assert main(["init", *parties, "--table", "bank=bank.csv", "--out", "bank"]) == 3
    error = capsys.readouterr().err
    assert "VFL-9145" in error
    assert '"repaid"' in error


@pytest.mark.parametrize(("many", "task"), [(300, "regression"), (20, "classification")])
def test_init_says_what_it_takes_for_the_id_and_the_label(tmp_path, capsys, many, task):
    people = pl.DataFrame({"person": range(300), "spent": [n % many for n in range(300)]})
    people.write_csv(tmp_path / "labels.csv")
    people.select("person", age=pl.col("spent") / 7).write_csv(tmp_path / "bank.csv")
    tables = [f"--table={name}={tmp_path / file}" for name, file in FILES.items()]
    assert main(["init", *tables, "--out", str(tmp_path / "run.toml")]) == 0
    said = capsys.readouterr().out
    assert 'bank: "person" is the id column' in said
    assert f'"spent" is the label, for a {task}: it has {many} different values' in said
    assert read_config(tmp_path / "run.toml").data.task == task


def test_all_tables_on_one_machine_are_shown_as_a_run_would_use_them(folder, capsys):
    path = folder / "run.toml"
    tables = {"server": "labels.csv", "bank": "bank.csv", "shop": "shop.parquet"}
    given = [word for name, file in tables.items() for word in ("--table", f"{name}={folder / file}")]
    assert main(["init", *given, "--label", "repaid", "--out", str(path)]) == 0
    capsys.readouterr()
    assert main(["data", str(path), "--json", "--set", "data.records=labelled"]) == 0
    server, bank, shop = json.loads(capsys.readouterr().out)["parties"]
    assert (server["rows"], server["training_rows"]) == (400, 280)
    assert server["labels"].keys() == {"no", "yes"}
    assert sum(server["labels"].values()) == pytest.approx(1)
    assert (bank["rows"], shop["rows"], shop["features"]) == (320, 320, 3)  # spent, city, absent
    assert main(["run", str(path), "--out", str(folder / "run"), "--set", "stop.updates=20"]) == 0


def test_names_are_written_as_toml_has_them(folder):
    path = folder / "run.toml"
    (folder / "bank.csv").rename(folder / "größe 😀.csv")
    (folder / "shop.parquet").rename(folder / "shop.pq")
    tables = [f"--table=north.bank={folder / 'größe 😀.csv'}", f"--table=shop={folder / 'shop.pq'}"]
    assert main(["init", *tables, "--parties", "north.bank, shop", "--out", str(path)]) == 0
    assert read_config(path).sources["north.bank"].path.endswith("größe 😀.csv")
    assert read_config(path).data.parties == ("north.bank", "shop")


def test_another_separator_is_noticed(folder):
    (folder / "bank.csv").write_text((folder / "bank.csv").read_text().replace(",", ";"))
    options = ["--parties", "bank,shop", "--table", f"bank={folder / 'bank.csv'}"]
    assert main(["init", *options, "--out", str(folder)]) == 0
    assert read_config(folder / "party.toml").sources["bank"].separator == ";"


def test_the_index_that_pandas_writes_is_not_taken_for_the_id(folder):
    pl.read_csv(folder / "bank.csv").with_row_index("").write_csv(folder / "bank.csv")
    options = ["--parties", "bank,shop", "--table", f"bank={folder / 'bank.csv'}"]
    assert main(["init", *options, "--out", str(folder)]) == 0
    assert read_config(folder / "party.toml").sources["bank"].id == "person"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--table", "bank"], 2, "--table takes PARTY=FILE"),
        (["--table", "server=labels.csv"], 2, "VFL-9144"),
        (["--table", "bank=missing.csv"], 3, "VFL-9146"),
        (["--table", "bank=junk.csv", "--id", "person"], 3, "junk.csv"),
        (["--table", "bank=twice.csv"], 3, "must be unique"),
        (["--table", "Müller=bank.csv"], 2, "a party's name must be"),
        (["--table", "b ank=bank.csv"], 2, "a party's name must be"),
        (["--table", "bank=bank.csv", "--parties", "bank,a/b"], 2, "a party's name must be"),
        (["--table", "bank=bank.csv", "--table", "bank=labels.csv"], 2, "each party once"),
        (["--table", "bank=bank.csv", "--parties", "bank,shop", "--out", "one.toml"], 2, "VFL-9098"),
        (["--table", "bank=bank.csv", "labels.csv"], 2, 'Found "labels.csv"'),
        (["--table", "bank=bank.csv", "--clients", "3"], 2, "Found --clients 3"),
        (["--parties", "bank,shop"], 2, "Found --parties bank,shop"),
        (["labels.csv", "--id", "person"], 2, "Found --id person"),
        (["--label", "repaid"], 2, 'Found "repaid"'),
    ],
)
def test_a_file_that_cannot_be_used_leaves_nothing_behind(
    folder, monkeypatch, capsys, arguments, code, message
):
    monkeypatch.chdir(folder)
    (folder / "junk.csv").write_bytes(bytes(range(256)) * 8)
    (folder / "twice.csv").write_text("person,x\n1,2\n1,3\n")
    before = sorted(folder.iterdir())
    assert main(["init", "--out", "new", *arguments]) == code
    assert message in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


def test_data_says_what_it_needs(folder, capsys):
    (folder / "digits.toml").write_text("")
    assert main(["data", str(folder / "digits.toml")]) == 2
    assert 'needs data.name = "csv" or "parties". Found "digits"' in capsys.readouterr().err
    (folder / "bank.toml").write_text(tomli_w.dumps(document(folder, "bank")))
    assert main(["data", str(folder / "bank.toml"), "--party", "shop"]) == 2
    assert "Found shop; the file has bank" in capsys.readouterr().err


def test_one_csv_is_explained_party_by_party(tmp_path, capsys):
    lines = [f"{n},{n % 7 or ''},{'rgb'[n % 3]},CH,2024-01-{1 + n % 28:02},{n % 2}" for n in range(80)]
    (tmp_path / "people.csv").write_text("id,visits,colour,land,since,bought\n" + "\n".join(lines))
    toml = tmp_path / "run.toml"
    assert main(["init", str(tmp_path / "people.csv"), "--out", str(toml)]) == 0
    said = capsys.readouterr().out
    assert "id is ignored: a different whole number" in said
    assert 'land is ignored: always "CH"' in said
    assert main(["data", str(toml), "--json"]) == 0
    server, first, second = json.loads(capsys.readouterr().out)["parties"]
    assert server["labels"] == {"0": 0.5, "1": 0.5}
    assert (server["records"], server["training_rows"]) == (80, 56)
    uses = {column["name"]: column["use"] for own in (first, second) for column in own["columns"]}
    assert uses == {"visits": "number", "colour": "category", "since": "date"}
    assert main(["data", str(toml), "--party", "client-2"]) == 0
    assert "since" in (shown := capsys.readouterr().out)
    assert "colour" not in shown


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_the_type_of_text_is_what_its_values_are_and_parquet_types_stay(tmp_path, capsys, ending):
    rows = range(80)
    people = pl.DataFrame(
        {
            "person": [f"P{n}" for n in rows],
            "visits": [n % 7 for n in rows],
            "spent": [n * 7 % 31 / 4 for n in rows],
            "since": [f"2024-01-{1 + n % 28:02}" for n in rows],
            "colour": ["rgb"[n % 3] for n in rows],
            "name": [f"name {n}" for n in rows],
            "one": [1 for _ in rows],
            "empty": [None for _ in rows],
        },
        schema_overrides={"empty": pl.String},
    )
    path, toml = tmp_path / f"bank.{ending}", tmp_path / "party.toml"
    (people.write_csv if ending == "csv" else people.write_parquet)(path)
    assert main(["init", "--parties", "bank", "--table", f"bank={path}", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["data", str(toml), "--json"]) == 0
    (bank,) = json.loads(capsys.readouterr().out)["parties"]
    types = {column["name"]: column["type"] for column in bank["columns"]}
    is_csv = ending == "csv"
    assert types == {
        "person": "",  # not read: it is the id
        "visits": "number" if is_csv else "Int64",
        "spent": "number" if is_csv else "Float64",
        "since": "date",
        "colour": "category",
        "name": "text",
        "one": "number" if is_csv else "Int64",
        "empty": "",
    }
