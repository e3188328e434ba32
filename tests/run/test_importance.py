"""`vafl importance` with all models on one machine: by party, group and column."""

import io
import json

import numpy as np
import pytest
import tomli_w
from rich.console import Console

from tests.companies import add_own_columns, document, write_companies
from vafl.cli import main
from vafl.config import read_config
from vafl.errors import ConfigError, DataError, Stalled
from vafl.privacy.ledger.accounts import KINDS
from vafl.privacy.ledger.ledger import read_ledger
from vafl.run.importance import measure_locally
from vafl.run.launch import launch
from vafl.run.model_store import read_deployed
from vafl.run.predict import Deployed


def trained(folder, sets=(), *, own=False, **sections):
    """The parties' tables, their configuration, and a run."""
    write_companies(folder)
    if own:
        add_own_columns(folder)
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(document(folder, **sections)))
    launch(read_config(path, list(sets)), folder / "run", Console(file=io.StringIO()))
    return path


def test_parties_groups_and_columns_are_ranked_by_what_they_tell(tmp_path, capsys):
    path = trained(tmp_path, ["embedding.model=mlp", "model.metric=accuracy"], own=True)
    groups = ["--set", 'parties.bank.source.groups.person=["age", "jo*"]']
    groups += ["--set", 'parties.server.source.groups.mine=["rating", "branch"]']
    assert main(["importance", str(path), "--model", str(tmp_path / "run"), *groups, "--repeats", "8"]) == 0
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "run" / "importance.json").read_text())
    assert (found["metric"], found["loss"], found["repeats"]) == ("accuracy", "log_loss", 8)
    bank, shop = found["features"]["bank"], found["features"]["shop"]
    assert set(bank) == {"income", "age", "job", "person"}
    assert set(shop) == {"spent", "city"}
    assert set(found["features"]["label-holder"]) == {"rating", "branch", "mine"}
    own = {name: measured["loss_increase"] for name, measured in (bank | shop).items()}
    assert min(own["income"], own["spent"]) > max(own["job"], own["city"], own["age"]) > 0
    assert found["parties"]["bank"]["loss_increase"] > own["job"]
    assert found["parties"]["shop"]["headline_drop"] > 0.05
    assert all(name in shown for name in ("income", "person", "importance.png"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["baseline"]["log_loss"] == pytest.approx(summary["kept"]["test"]["log_loss"], rel=1e-4)
    assert found["rows"] == len(read_rows(tmp_path, path))
    unknown = ["--set", 'parties.bank.source.groups.person=["height"]']
    assert main(["importance", str(path), "--model", str(tmp_path / "run"), *unknown]) == DataError.exit_code
    assert "parties.bank.source.groups.person" in capsys.readouterr().err.replace("\n", " ")
    assert main(["importance", str(path), "--model", str(tmp_path / "run"), "--repeats", "0"]) == 2


def read_rows(folder, path):
    return np.arange(round(len(Deployed.load(read_config(path), "server", folder / "run").records.ids) / 4))


FROZEN = {"mode": "frozen", "clip": 1.0, "noise": 4.0, "mu_max": 2**0.5}  # mu^2 1/4 an upload, eight of them


def test_every_answer_of_a_private_client_is_charged_and_refused_once_the_budget_is_spent(tmp_path):
    config_of = {"data": {"scale": "none"}, "model": {"head": "linear", "width": 2}, "privacy": FROZEN}
    path = trained(
        tmp_path, ['parties.bank.source.ignore=["job"]', 'parties.shop.source.ignore=["city"]'], **config_of
    )
    ledger = tmp_path / "bank.ledger"

    def measure(*sets, repeats=2):
        def configs(party):
            return read_deployed(path, sets, tmp_path / "run", party)

        return measure_locally(
            configs("server"), configs, tmp_path / "run", Console(file=io.StringIO()), repeats=repeats
        )

    found = measure()
    assert set(found.parties) == {"bank", "shop"}
    assert not found.features, "columns cost more, so a private client has to allow them"
    uploads = read_ledger(ledger).counts[KINDS.index("prediction")]
    assert set(uploads.tolist()) == {0, 3}, "once as they are, twice permuted, and held-out people only"
    found = measure("prediction.importance=columns", repeats=1)
    assert read_ledger(ledger).spent.max() <= 2 * (1 + 1e-9)
    assert list(found.features["bank"]) == ["income"], "one upload is left for age, which takes two"
    assert set(found.parties) == {"bank", "shop"}
    assert "budget" in found.refused["bank"]


def test_a_secure_sum_and_a_client_that_allows_nothing(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(
        '[data]\nname = "iris"\n[partition]\nclients = 3\n[stop]\nupdates = 5\n[rule]\nname = "sync"\n'
        '[schedule]\nrefresh = "none"\n'
    )
    launch(read_config(path, ["privacy.secure_sum=true"]), tmp_path / "sum", Console(file=io.StringIO()))
    with pytest.raises(ConfigError, match="VFL-7161"):
        Deployed.load(read_config(path), "server", tmp_path / "sum").importance_scorer()
    masked = Deployed.load(read_config(path), "client-1", tmp_path / "sum").prediction_client()
    assert masked._permutations is None
    assert main(["importance", str(path), "--model", str(tmp_path / "sum")]) == ConfigError.exit_code

    launch(read_config(path), tmp_path / "run", Console(file=io.StringIO()))
    none = ["--set", 'prediction.importance="none"']
    assert main(["importance", str(path), "--model", str(tmp_path / "run"), *none]) == Stalled.exit_code
    assert "client-3: * is not permuted here" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run" / "importance.json").exists()
    assert main(["importance", str(path), "--model", str(tmp_path / "run")]) == 0
    found = json.loads((tmp_path / "run" / "importance.json").read_text())
    assert found["metric"] == "accuracy"
    assert set(found["features"]["client-1"]) == {"feature 1", "feature 2"}
