"""A ledger stays valid for its people across alignments, row orders, runs, partners and predictions."""

import io
import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from tests.companies import configuration, document
from vafl.cli import main
from vafl.config import from_document, read_config
from vafl.errors import ConfigError, LedgerError, RunFolderError
from vafl.privacy.ledger.ledger import read_ledger
from vafl.privacy.settings import PrivacySettings
from vafl.run.assembly import make_plan, make_privacy
from vafl.run.launch import launch
from vafl.run.ledgers import ledger_path, read_statements
from vafl.run.predict import Deployed

FROZEN = {"mode": "frozen", "clip": 1.0, "noise": 4.0, "mu_max": 1.0}  # mu^2 1/4 an upload, four of them


def write_tables(folder, labelled, banked=range(40)):
    """Write the tables with the people in `labelled` (label holder), `banked` (bank) and everyone (shop)."""
    folder.mkdir(exist_ok=True)
    values = np.random.default_rng(0).normal(size=60)

    def table(people, column, content):
        return pl.DataFrame({"person": [f"P{each}" for each in people], column: content[list(people)]})

    table(labelled, "repaid", np.where(values > 0, "yes", "no")).write_csv(folder / "labels.csv")
    table(banked, "income", values).write_csv(folder / "bank.csv")
    table(range(60), "spent", values).write_parquet(folder / "shop.parquet")


def settings(folder, **sections):
    data = {"scale": "none", **sections.pop("data", {})}
    model = {"head": "linear", "width": 2}
    return configuration(folder, data=data, model=model, privacy=FROZEN, **sections)


def upload_all(config, run, times=1):
    """Let the bank upload every row `times` times; return its people and how many rows each upload had."""
    plan = make_plan(config, party="bank")
    index = config.data.parties.index("bank")
    own = make_privacy(plan, index, run)
    rows = np.arange(len(own.features))
    uploaded = [len(own.budget.spend(rows, "request")) for _ in range(times)]
    own.budget.ledger.close()
    return plan.data.parties[index].ids, uploaded


def spent(folder):
    ledger = read_ledger(folder / "bank.ledger")
    return dict(zip(ledger.ids, ledger.spent.tolist(), strict=True))


def test_a_new_alignment_goes_on_with_everyones_account(tmp_path, capsys):
    folder = tmp_path / "tables"
    write_tables(folder, range(30))
    first, uploaded = upload_all(settings(folder), tmp_path / "first", 3)
    assert uploaded == [30, 30, 30]
    write_tables(folder, range(20, 50), np.random.default_rng(1).permutation(50))
    others = settings(folder, data={"parties": ["shop", "bank"]})
    second, uploaded = upload_all(others, tmp_path / "second", 2)
    assert uploaded == [30, 20], "ten of these people had been uploaded three times"
    both = set(first) & set(second)
    assert len(both) == 10
    assert spent(folder) == {
        **dict.fromkeys(first, 0.75),
        **dict.fromkeys(second, 0.5),
        **dict.fromkeys(both, 1.0),
    }
    assert main(["privacy", str(folder / "bank.ledger"), "--record", next(iter(both))]) == 0
    told = capsys.readouterr().out
    assert "mu 1 spent" in told
    assert "left: mu 0 of 1, 0 minibatches" in told
    assert "3 request" in told
    assert "4 request" in told


def test_people_whom_a_client_lacks_have_no_account_and_no_limit(tmp_path):
    folder = tmp_path / "tables"
    write_tables(folder, range(60))
    people, uploaded = upload_all(settings(folder, data={"records": "labelled"}), tmp_path / "run", 5)
    assert people.null_count() == 20
    assert uploaded == [60, 60, 60, 60, 20]
    assert spent(folder) == {f"P{each}": 1.0 for each in range(40)}


def test_another_id_column_is_refused(tmp_path):
    folder = tmp_path / "tables"
    write_tables(folder, range(30))
    upload_all(settings(folder), tmp_path / "first")
    bank = pl.read_csv(folder / "bank.csv")
    bank.rename({"person": "customer"}).write_csv(folder / "bank.csv")
    config = settings(folder)
    tables = {**config.sources, "bank": replace(config.sources["bank"], id="customer")}
    with pytest.raises(RunFolderError, match=r'VFL-5032.*people by "person".*people by "customer"'):
        upload_all(config.with_sources(tables), tmp_path / "second")


def test_predictions_go_on_with_the_ledger_of_the_training_wherever_the_new_table_lies(tmp_path):
    then, now, run = tmp_path / "then", tmp_path / "now", tmp_path / "run"
    write_tables(then, range(30))
    launch(settings(then), run, Console(file=io.StringIO()))
    upload_all(settings(then), run, 3)
    write_tables(now, range(20, 40))
    client = Deployed.load(settings(now), "bank", run).prediction_client()
    assert len(client._budget.spend(np.arange(20), "prediction")) == 20
    assert len(client._budget.spend(np.arange(20), "prediction")) == 10
    client._budget.ledger.close()
    assert not (now / "bank.ledger").exists()


def test_a_run_folder_cannot_choose_where_a_new_ledger_is_written(tmp_path):
    """RUN/config.toml comes with the model. It may name an existing ledger, but not create a new one."""
    tables, run, elsewhere = tmp_path / "tables", tmp_path / "run", tmp_path / "elsewhere"
    write_tables(tables, range(30))
    launch(settings(tables), run, Console(file=io.StringIO()))
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace('ledger = ""', f'ledger = "{elsewhere}"'))
    elsewhere.mkdir()
    client = Deployed.load(settings(tables), "bank", run).prediction_client()
    client._budget.ledger.close()
    assert not list(elsewhere.iterdir())
    assert Deployed.load(settings(tables), "server", run)._marks().parent != elsewhere
    assert (tables / "bank.ledger").is_file()


def unprotected(folder, **privacy):
    config = settings(folder)
    return replace(config, privacy=PrivacySettings(**privacy))


def test_where_a_ledger_is_a_run_without_noise_must_say_so_and_is_entered(tmp_path, capsys):
    folder = tmp_path / "tables"
    write_tables(folder, range(30))
    assert make_privacy(make_plan(unprotected(folder), party="bank"), 0, tmp_path / "run") is None
    first, _ = upload_all(settings(folder), tmp_path / "first")
    with pytest.raises(ConfigError, match=r"VFL-7111.*bank"):
        upload_all(unprotected(folder), tmp_path / "second")
    assert set(spent(folder).values()) == {0.25}
    _, uploaded = upload_all(unprotected(folder, mode="none"), tmp_path / "second")
    assert uploaded == [30]
    assert spent(folder) == dict.fromkeys(first, math.inf)
    assert upload_all(settings(folder), tmp_path / "third")[1] == [0]
    assert main(["privacy", str(folder / "bank.ledger"), "--record", first[0]]) == 0
    assert "unbounded" in capsys.readouterr().out


def test_predictions_without_noise_are_entered_too(tmp_path):
    then, now, run = tmp_path / "then", tmp_path / "now", tmp_path / "run"
    write_tables(then, range(30))
    launch(unprotected(then), run, Console(file=io.StringIO()))
    write_tables(now, range(10, 40))
    upload_all(settings(now), tmp_path / "other")
    with pytest.raises(ConfigError, match="VFL-7111"):
        Deployed.load(unprotected(now), "bank", run).prediction_client()
    client = Deployed.load(unprotected(now, mode="none"), "bank", run).prediction_client()
    assert len(client._budget.spend(np.arange(5), "prediction")) == 5
    client._budget.ledger.close()
    assert sorted(spent(now).values()) == [0.25] * 25 + [math.inf] * 5


def test_each_party_has_its_own_budget_and_folder(tmp_path):
    write_tables(tmp_path, range(40))
    whole = document(tmp_path, data={"scale": "none"}, model={"head": "linear", "width": 2}, privacy=FROZEN)
    whole["parties"]["bank"]["privacy"] = {"mu_max": 2.0, "ledger": str(tmp_path / "kept")}
    config = from_document(whole)
    (tmp_path / "kept").mkdir()
    upload_all(config, tmp_path / "run")
    assert ledger_path(config, "bank", tmp_path / "run") == tmp_path / "kept" / "bank.ledger"
    (statement,) = read_statements(config, tmp_path / "run")
    assert statement.as_json()["mu_max"] == 2.0
    assert ledger_path(config, "shop", tmp_path / "run") == tmp_path / "shop.ledger"


def test_a_relative_ledger_folder_is_taken_from_the_config_file(tmp_path, monkeypatch):
    (tmp_path / "own.toml").write_text('[privacy]\nledger = "accounts"\n')
    monkeypatch.chdir("/")
    assert read_config(tmp_path / "own.toml").privacy.ledger == str(tmp_path / "accounts")


def test_a_run_without_noise_does_not_overlook_a_ledger_of_which_only_the_head_is_left(tmp_path, capsys):
    folder = tmp_path / "tables"
    write_tables(folder, range(30))
    upload_all(settings(folder), tmp_path / "first")
    (folder / "bank.ledger").unlink()
    with pytest.raises(ConfigError, match="VFL-7111"):
        upload_all(unprotected(folder), tmp_path / "second")
    with pytest.raises(LedgerError, match="VFL-5038"):
        upload_all(unprotected(folder, mode="none"), tmp_path / "second")
    config = settings(folder)
    (tmp_path / "second").mkdir(exist_ok=True)
    (tmp_path / "second" / "config.toml").write_text(config.to_toml())
    assert main(["privacy", str(tmp_path / "second")]) == LedgerError.exit_code
    assert "bank.ledger.head" in capsys.readouterr().err.replace("\n", "")
