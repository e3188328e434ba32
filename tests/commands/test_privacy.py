"""`vafl privacy` and `vafl audit`, as a user starts them."""

import json
import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from tests.privacy.ledger.people import opened
from vafl.cli import main
from vafl.privacy.analysis.accountant import epsilon
from vafl.privacy.ledger.ledger import Ledger, numbered, read_ledger
from vafl.privacy.ledger.spender import Spender
from vafl.privacy.ledger.statement import Statement, person
from vafl.privacy.settings import PrivacySettings

CONFIG = """
[data]
validation_fraction = 0.1
[partition]
clients = 2
[schedule]
batch_size = 100
refresh = "none"
[privacy]
clip = 2.0
noise = 4.0
gradient_clip = 1.0
gradient_noise = 2.0
neighbours = "zero_out"
mu_max = 3.0
[stop]
updates = 60
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("privacy")
    (folder / "private.toml").write_text(CONFIG)
    assert main(["run", str(folder / "private.toml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_it_says_what_was_spent_and_what_is_left(run, capsys):
    assert main(["privacy", str(run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["simulated"] is True
    evaluations = len((run / "history.jsonl").read_text().splitlines())
    for party in report["parties"]:
        uses = party["mu_any_record"] ** 2 / 0.5
        assert uses == pytest.approx(round(uses))
        assert party["epsilon_any_record"] == pytest.approx(epsilon(party["mu_any_record"], 1e-5))
        assert party["minibatches_left"] == 18 - round(uses)
        assert sum(party["histogram"]["records"]) == party["records"] == 1797
        assert party["uploads"]["evaluation"] == 180 * evaluations + 449  # validation rows; test rows once
        assert party["paper"]["valid"] is False
    together = report["person"]
    worst = max(party["mu_any_record"] for party in report["parties"])
    assert worst < together["mu"] <= math.sqrt(2) * worst
    assert together["epsilon"] == pytest.approx(epsilon(together["mu"], 1e-5))
    assert (together["ledgers"], together["ledgers_with_it"], together["clients"]) == (2, 2, 2)
    assert together["if_other_clients_spent_as_much"] is None  # all of them are here
    assert (run / "privacy-spent.png").stat().st_size > 5000
    assert (run / "privacy-spent.svg").exists()


def test_it_answers_for_one_record(run, capsys):
    assert main(["privacy", str(run), "--record", "17", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for account in report["parties"].values():
        assert account["mu"] == pytest.approx(math.sqrt(0.5 * account["uploads"]["batch"]))
    together = math.hypot(*(account["mu"] for account in report["parties"].values()))
    assert report["person"]["mu"] == pytest.approx(together)
    assert main(["privacy", str(run), "--record", "17"]) == 0
    shown = capsys.readouterr().out
    assert "record 17" in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown  # a file is wide enough for its tables


def test_it_is_readable_on_a_terminal(run, capsys):
    assert main(["privacy", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "per record: every upload and every local update is noised" in shown
    assert "not valid" in shown
    assert "A simulation" in shown


def test_a_record_that_is_not_there_is_an_error(run, capsys):
    assert main(["privacy", str(run), "--record", "1797"]) == 3
    assert 'Found none for "1797"' in capsys.readouterr().err


def test_a_run_without_ledgers_is_an_error(tmp_path, capsys):
    assert main(["privacy", str(tmp_path)]) == 5
    (tmp_path / "config.toml").write_text("")
    assert main(["privacy", str(tmp_path)]) == 5
    assert "has no privacy ledgers" in capsys.readouterr().err


def test_embed_only_is_charged_for_what_others_carry():
    settings = PrivacySettings(mode="embed_only", clip=1.0, noise=2.0, neighbours="zero_out")
    ledger = Ledger(None, "set")
    ledger.begin(Spender("", "training", (), settings), numbered(4))
    for rows in ([0, 1], [2, 3], [0, 1]):
        ledger.charge(
            np.array(rows), "batch", settings.upload_cost, carried=settings.carried_cost, trains=True
        )
    statement = Statement("own", ledger, settings, 2)
    expected = np.sqrt([0.5 + 4 * 1.0, 0.5 + 4 * 1.0, 0.25 + 2 * 1.0, 0.25 + 2 * 1.0])
    assert np.allclose(statement.mu, expected)
    assert (ledger.spent < statement.mu**2).all()


def test_what_mu_means_is_said_by_the_neighbours(tmp_path, capsys):
    """If mu bounds a record against zeros, two values of the record are up to 2 mu apart."""
    for neighbours, mu in (("zero_out", 0.5), ("replace", 1.0)):
        settings = PrivacySettings(mode="frozen", clip=1.0, noise=2.0, neighbours=neighbours, mu_max=2.0)
        ledger, _ = opened(tmp_path / f"{neighbours}.ledger", settings=settings)
        ledger.charge(np.arange(5), "batch", settings.upload_cost)
        ledger.close()
        for asked in ([], ["--record", "bob"]):
            assert main(["privacy", str(ledger.path), *asked]) == 0
            assert f"privacy.neighbours {neighbours}" in " ".join(capsys.readouterr().out.split())
        assert main(["privacy", str(ledger.path), "--json"]) == 0
        (party,) = json.loads(capsys.readouterr().out)["parties"]
        assert (party["neighbours"], party["mu_any_record"], party["mu_two_values"]) == (neighbours, mu, 1.0)
        assert main(["privacy", str(ledger.path), "--record", "bob", "--json"]) == 0
        account = json.loads(capsys.readouterr().out)["parties"][neighbours]
        assert (account["mu"], account["mu_two_values"], account["runs"][0]["mu"]) == (mu, 1.0, mu)


def entered(folder, party, people, costs):
    """Write the ledger of one of three clients, in which each person has spent this much mu^2."""
    settings = PrivacySettings(mode="frozen", clip=1.0, noise=2.0, mu_max=9.0)
    ledger = Ledger(folder / f"{party}.ledger", "people")
    spender = Spender("run", "training", ("bank", "shop", "clinic"), settings)
    accounts = ledger.begin(spender, pl.Series("id", people, pl.String))
    for account, cost in zip(accounts, costs, strict=True):
        ledger.charge(np.array([account]), "batch", cost)
    ledger.close()
    statement = Statement(party, read_ledger(ledger.path), settings, 1)
    return ledger.path, statement


def test_mu_of_a_person_adds_up_over_the_ledgers_that_know_the_id(tmp_path):
    """The order of people does not matter, nor whether all ledgers have them."""
    _, bank = entered(tmp_path, "bank", ["ann", "bob", "cleo"], [1.0, 2.0, 4.0])
    _, shop = entered(tmp_path, "shop", ["dan", "bob", "ann"], [4.5, 3.0, 0.5])
    found = person([bank, shop])
    assert (found["record"], found["ledgers_with_it"], found["clients"]) == ("bob", 2, 3)
    assert found["mu"] == pytest.approx(5**0.5)
    estimate = found["if_other_clients_spent_as_much"]
    assert estimate["mu"] == pytest.approx(7.5**0.5)
    assert estimate["epsilon"] == pytest.approx(epsilon(7.5**0.5, 1e-5))
    assert person([bank, shop], "ann")["mu"] == pytest.approx(1.5**0.5)
    assert person([bank, shop], "cleo")["mu"] == pytest.approx(2.0)


def test_of_one_ledger_alone_the_other_clients_are_an_estimate(tmp_path, capsys):
    path, _ = entered(tmp_path, "bank", ["ann", "bob"], [1.0, 4.0])
    assert main(["privacy", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["person"]
    assert (found["ledgers"], found["clients"], found["mu"]) == (1, 3, 2.0)
    assert found["if_other_clients_spent_as_much"]["mu"] == pytest.approx(3**0.5 * 2.0)
    for asked, mu in ([], "3.464"), (["--record", "ann"], "1.732"):
        assert main(["privacy", str(path), *asked]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"all 3 clients, an estimate: mu {mu}" in shown


def test_records_of_one_batch_share_the_noise_on_their_gradients_so_all_together_cost_more():
    """Three sums of two clipped gradients, each of which moves by up to 2 clips, and six uploads."""
    noised = {"clip": 1.0, "noise": 2.0, "gradient_clip": 3.0, "gradient_noise": 4.0}
    settings = PrivacySettings(**noised, neighbours="zero_out", mu_max="unlimited")
    ledger = Ledger(None, "set")
    for run in (settings, replace(settings, neighbours="replace")):
        ledger.begin(Spender("", "training", (), run, batch=2, local_steps=3), numbered(4))
        ledger.charge(np.array([0, 1]), "batch", run.batch_cost(3))
        ledger.charge(np.array([2]), "evaluation", run.upload_cost)
    expected = 2 * (2 * 1 / 4 + 3 * (2 * 3 / 4) ** 2 + 1 / 4)
    assert Statement("own", ledger, settings, 2).mu_together == pytest.approx(math.sqrt(expected))
    assert Statement("own", ledger, run, 2).mu_together == pytest.approx(2 * math.sqrt(expected))


def test_local_steps_leave_fewer_minibatches():
    settings = PrivacySettings(clip=1.0, noise=2.0, gradient_clip=1.0, gradient_noise=2.0, mu_max=4.0)
    left = [Statement("own", Ledger.in_memory(1), settings, 1, steps).left(0.0) for steps in (1, 3)]
    assert left == [8, 4]


def test_without_a_clip_nothing_is_bounded():
    ledger = Ledger.in_memory(2)
    settings = PrivacySettings(mode="embed_only", noise=2.0)
    ledger.charge(np.array([0]), "batch", settings.upload_cost, carried=settings.carried_cost, trains=True)
    assert Statement("own", ledger, settings, 1).as_json()["epsilon_any_record"] == math.inf


@pytest.mark.parametrize("asked", [[], ["--record", "bob"]])
def test_what_is_unbounded_is_null_in_json_which_has_no_infinity(tmp_path, capsys, asked):
    ledger, _ = opened(tmp_path / "own.ledger", settings=PrivacySettings(mode="none"))
    ledger.charge(np.arange(5), "batch", math.inf)
    ledger.close()
    assert main(["privacy", str(ledger.path), "--json", *asked]) == 0
    said = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    own = said["parties"]["own"] if asked else said["parties"][0]
    assert own["mu" if asked else "mu_any_record"] is None
    assert said["person"]["mu"] is said["person"]["if_other_clients_spent_as_much"]["mu"] is None


def test_an_audit_passes_fails_and_writes_json(run, tmp_path, capsys):
    config = str(run.parent / "private.toml")
    assert main(["audit", config, "--noise-scale", "0.4", "--json", str(tmp_path / "new" / "a.json")]) == 6
    assert "mechanism, dp_train: accountant mu" in capsys.readouterr().err
    assert json.loads((tmp_path / "new" / "a.json").read_text())["verdict"] == "broken"
    loud = ["--set", "privacy.noise=0.05", "--set", "privacy.gradient_noise=0.05"]
    assert main(["audit", config, *loud, "--noise-scale", "0.5"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "cannot tell" in said
    assert "holds" not in said
    assert "Audited: a linear client" in said
    assert main(["audit", config, "--canaries", "50"]) == 2
    assert main(["audit", config, "--json", str(tmp_path)]) == 2


def test_torn_entries_and_accepted_marks_are_shown(tmp_path, capsys):
    """Both mean that the sums are not exactly what was uploaded: they may be too high or too low."""
    settings = PrivacySettings(mode="frozen", clip=1.0, noise=2.0, neighbours="zero_out", mu_max="unlimited")
    ledger, _ = opened(tmp_path / "own.ledger", settings=settings)
    ledger.close()
    with ledger.path.open("ab") as file:
        file.write(b"torn")
    ledger, _ = opened(ledger.path, settings=settings)
    ledger.accept(bytes(16))
    ledger.close()
    assert main(["privacy", str(ledger.path)]) == 0
    told = capsys.readouterr().out
    assert "torn" in told
    assert "accepted" in told
    assert main(["privacy", str(ledger.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["parties"][0]
    assert found["uploads"]["torn"] == 5
    assert found["mu_any_record"] == 0.5
    assert found["ledgers_accepted"] == ledger.accepted
    assert main(["privacy", str(ledger.path), "--record", "bob", "--json"]) == 0
    (share,) = json.loads(capsys.readouterr().out)["parties"]["own"]["runs"]
    assert (share["mu"], share["uploads"]["torn"]) == (0.5, 1)
