"""Companies as real processes: models trained with --set are used without it; importance is measured."""

import json
import subprocess
import sys

import polars as pl
import pytest
import torch

from tests.companies import add_own_columns, write_companies
from tests.machine import Machine
from vafl.config import read_config
from vafl.names import LOCAL_CLIENT
from vafl.protocol.prediction_client import embed
from vafl.run.model_store import open_model, rebuild
from vafl.run.plan import make_plan

PARTIES = ("bank", "shop")
CONFIG = """
seed = 1
[data]
name = "parties"
parties = ["bank", "shop"]
[parties.server.source]
path = "labels.csv"
id = "person"
label = "repaid"
[parties.bank.source]
path = "bank.csv"
id = "person"
[parties.bank.source.groups]
person = ["age", "job"]
[parties.shop.source]
path = "shop.parquet"
id = "person"
[schedule]
batch_size = 32
[stop]
updates = 400
patience = 0
[network]
address = "127.0.0.1:{port}"
certificates = "certs"
join_timeout = 200.0
"""
SETS = (
    *("embedding.model=mlp", "embedding.hidden=[7]", "model.width=3", "model.head=linear"),
    *("model.combine=concat", "seed=5", "data.test_fraction=0.3", "optimiser.step_size=0.01"),
    *("optimiser.name=Adam", 'parties.bank.source.missing=["cook"]', "network.encoding=float16"),
)


class Companies(Machine):
    def use(self, command, party, *options):
        """Start a command that uses the model which this party trained, without any --set of the training."""
        run = self.folder / ("run" if party == "server" else party)
        words = [command, str(self.folder / "run.toml"), "--party", party, "--model", str(run), *options]
        with (self.folder / f"{command}-{party}.log").open("ab") as log:
            self.processes[party] = subprocess.Popen(
                [sys.executable, "-m", "vafl.cli", *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def together(self, command, **own):
        for party in ("server", *PARTIES):
            self.use(command, party, *own.get(party, ()))
        for party in ("server", *PARTIES):
            log = self.folder / f"{command}-{party}.log"
            assert self.wait(party) == 0, log.read_text()[-2000:]


@pytest.fixture
def companies(tmp_path):
    folder = tmp_path
    write_companies(folder)
    add_own_columns(folder)
    made = Companies(folder, CONFIG.replace("{seconds}", ""), PARTIES)
    sets = [word for setting in SETS for word in ("--set", setting)]
    for party in ("server", *PARTIES):
        made.start(party, *sets)
    for party in ("server", *PARTIES):
        assert made.wait(party) == 0, made.log(party)[-2000:]
    yield made
    made.end()


def test_one_training_run_is_shown_by_its_clients_used_without_its_sets_and_measured(companies):
    _check_clients_show_their_training_and_no_figure_of_the_labels(companies)
    _check_predictions_need_no_set_of_the_training(companies)
    _check_importance_is_measured_as_far_as_each_client_allows(companies)


def _check_clients_show_their_training_and_no_figure_of_the_labels(companies):
    for party in PARTIES:
        status = json.loads((companies.folder / party / "state" / party / "status.json").read_text())
        summary = companies.summary()
        assert status["party"] == party
        assert status["uploads"] >= summary["activations"][party] > 0
        assert 0 < status["updates"] <= status["most_updates"] == 400
        assert status["epochs"] > 1
        assert 0 <= status["delay_mean"] <= status["delay_max"]
        assert status["bytes_up"] > status["bytes_down"] > 0
        log = companies.log(party)
        assert f"{status['uploads']:,} uploads" in log
        for secret in ("loss", "auc", "accuracy"):
            assert secret not in log
            assert not any(secret in name for name in status)


def _check_predictions_need_no_set_of_the_training(companies):
    """The scores are those of the models on features encoded by the settings of the training."""
    out = companies.folder / "scores.csv"
    companies.together("predict", server=("--out", str(out)))
    scores = pl.read_csv(out)
    config = read_config(companies.folder / "run.toml", list(SETS))
    head = open_model(companies.folder / "run", "server")
    assert set(head.manifest.parties) == {*PARTIES, LOCAL_CLIENT}
    expected, ids = [], None
    for index, party in enumerate(head.manifest.parties):
        is_local = party == LOCAL_CLIENT
        own = make_plan(config, party="server" if is_local else party).data.parties[index]
        model = rebuild(open_model(companies.folder / ("run" if is_local else party), party))
        expected.append(embed(model, own.features).half().float())  # as they travelled
        ids = own.ids
    with torch.no_grad():
        outputs = rebuild(head)(torch.cat(expected, 1))
    shares = head.manifest.decision.probabilities(outputs)[:, 1]
    chances = dict(zip(ids, shares.tolist(), strict=True))
    assert scores["p(yes)"].to_list() == pytest.approx([chances[each] for each in scores["id"]], abs=1e-5)


def _check_importance_is_measured_as_far_as_each_client_allows(companies):
    companies.together(
        "importance", server=("--repeats", "4"), shop=("--set", "prediction.importance=columns")
    )
    found = json.loads((companies.folder / "run" / "importance.json").read_text())
    assert set(found["parties"]) == {*PARTIES, LOCAL_CLIENT}
    assert set(found["features"]["bank"]) == {"person"}, "only the group that it named"
    assert set(found["features"]["shop"]) == {"spent", "city"}
    assert found["features"]["shop"]["spent"]["loss_increase"] > 0.05
    assert found["parties"]["bank"]["headline_drop"] > 0.02
    test = companies.summary()["kept"]["test"]
    assert found["baseline"]["log_loss"] == pytest.approx(test["log_loss"], rel=0.01)
    assert (companies.folder / "run" / "importance.png").stat().st_size > 1000
    log = (companies.folder / "importance-server.log").read_text()
    assert "income" not in log, "a column that the bank did not name"
