import json
from pathlib import Path

import pytest

from vafl.cli import main
from vafl.config import read_config
from vafl.privacy.analysis.accountant import epsilon, mu
from vafl.run.assembly import build
from vafl.run.controller import End, Ending

CONFIG = """
[data]
name = "iris"
[schedule]
batch_size = 16
refresh = "none"
[rule]
name = "sync"
[stop]
updates = 140
"""


NOISED = "privacy.noise=2.0"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return str(path)


def calibrated(capsys, *arguments):
    assert main(["calibrate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_noise_for_a_budget_by_hand(config, capsys):
    """By default, neighbours replace a record, so its upload changes by up to two clips."""
    report = calibrated(capsys, config, "--mu", "0.5", "--set", "evaluation.every=100")
    assert report["clients"]["client-1"]["uploads"] == 20  # 140 batches, 7 an epoch
    assert report["to_set"]["release_once"]["noise"] == pytest.approx(4.0)
    assert report["to_set"]["frozen"]["noise"] == pytest.approx(2 * 20**0.5 / 0.5)
    assert report["to_set"]["dp_train"]["noise"] == pytest.approx(2 * 40**0.5 / 0.5)
    assert report["to_set"]["dp_train"]["gradient_noise"] == pytest.approx(2 * 40**0.5 / 0.5)
    assert report["paper"]["label"] == "not valid against the server"
    assert report["paper"]["noise"]["K counts minibatch steps"]["first_order"] == pytest.approx(
        2 * 16 / 112 * 140**0.5 / 0.5
    )


def test_a_person_at_all_clients_spends_more_than_at_one(config, capsys):
    report = calibrated(capsys, config, "--mu", "0.5", "--set", "partition.clients=4", "--set", NOISED)
    assert report["budget"]["person"]["mu"] == pytest.approx(1.0)
    assert report["budget"]["person"]["epsilon"] == pytest.approx(epsilon(1.0, 1e-5))
    worth = report["as_configured"]["worth"]["release_once"]
    assert worth["person"]["mu"] == pytest.approx(2 * worth["mu"])


@pytest.mark.parametrize("mode", ["release_once", "frozen", "dp_train"])
def test_the_section_it_prints_runs_within_its_budget(config, capsys, tmp_path, mode):
    """The printed section is used unchanged. Every record spends what is planned; no upload is refused."""
    sections = ["data.scale=none", "model.head=linear", "evaluation.every=100"]
    chosen = [word for setting in sections for word in ("--set", setting)]
    assert main(["calibrate", config, "--epsilon", "4", *chosen, "--set", f"privacy.mode={mode}"]) == 0
    _, _, after = capsys.readouterr().out.partition("[privacy]")
    pasted = tmp_path / "pasted.toml"
    pasted.write_text(f"{CONFIG}[privacy]{after.partition(chr(10) * 2)[0]}")
    settings = read_config(pasted, sections)
    run = build(settings)
    run.train()
    assert run.end == End.of(Ending.UPDATES, updates=140)
    spent = max(float(ledger.spent.max()) for ledger in run.ledgers) ** 0.5
    assert settings.privacy.limit == pytest.approx(mu(4.0, 1e-5), rel=1e-5)
    assert settings.privacy.limit * 0.999 <= spent <= settings.privacy.limit


def test_a_secure_sum_may_be_calibrated(config, capsys):
    choices = ("--set", "privacy.secure_sum=true", "--set", "partition.clients=3")
    report = calibrated(capsys, config, "--mu", "0.5", *choices)
    assert report["to_set"]["dp_train"]["gradient_noise"] == pytest.approx(2 * 40**0.5 / 0.5)


def test_epsilon_and_delta_are_turned_into_mu(config, capsys):
    report = calibrated(capsys, config, "--epsilon", "3.8486", "--delta", "1e-5")
    assert report["budget"]["mu"] == pytest.approx(20**0.5 / 5, rel=1e-4)
    assert report["to_set"]["frozen"]["noise"] == pytest.approx(10.0, rel=1e-4)


def test_noise_that_is_set_is_judged(config, capsys):
    report = calibrated(
        capsys, config, "--set", "privacy.noise=10", "--set", "privacy.clip=1", "--set", "privacy.mode=frozen"
    )
    worth = report["as_configured"]["worth"]
    assert worth["frozen"]["epsilon"] == pytest.approx(3.8486, abs=5e-5)
    assert "dp_train" not in worth  # without gradient_noise it guarantees nothing
    assert worth["embed_only"]["mu"] > 10 * worth["frozen"]["mu"]
    assert report["as_configured"]["paper"]["label"] == "not valid against the server"


def test_what_to_set_is_worth_the_budget(config, capsys):
    for neighbours in ("replace", "zero_out"):
        chosen = ["--set", f"privacy.neighbours={neighbours}"]
        found = calibrated(capsys, config, "--mu", "0.7", *chosen)["to_set"]["dp_train"]
        settings = [f"privacy.{name}={value}" for name, value in found.items()]
        chosen += [word for setting in settings for word in ("--set", setting)]
        report = calibrated(capsys, config, *chosen)
        assert report["as_configured"]["worth"]["dp_train"]["mu"] == pytest.approx(0.7)


@pytest.mark.parametrize("mode", ["release_once", "frozen", "dp_train"])
@pytest.mark.parametrize(
    ("settings", "slack"),
    [
        (["rule.name=sync"], 1.01),
        (["rule.name=async", "schedule.refresh=all"], 1.01),
        (["rule.name=async", "schedule.refresh=lookahead", "rule.local_steps=2"], 1.6),
        (["rule.name=async", "rule.delay_bound=3"], 1.6),
    ],
)
def test_a_run_with_calibrated_noise_spends_at_most_the_budget(config, capsys, mode, settings, slack):
    """Compare the plan with the ledger, which counts the real uploads of the simulated run."""
    settings = [*settings, "data.scale=none", "model.head=linear", "delays.kind=fixed", "privacy.clip=2.0"]
    chosen = [word for setting in settings for word in ("--set", setting)]
    found = calibrated(capsys, config, *chosen, "--mu", "0.8")["to_set"][mode]
    settings += [f"privacy.mode={mode}", f"privacy.noise={found['noise']}", "privacy.mu_max=unlimited"]
    if mode == "dp_train":
        settings += ["privacy.gradient_clip=1.0", f"privacy.gradient_noise={found['gradient_noise']}"]
    run = build(read_config(Path(config), settings))
    run.train()
    spent = max(float(ledger.spent.max()) for ledger in run.ledgers) ** 0.5
    assert 0.8 / slack <= spent <= 0.8 * (1 + 1e-9)


EXPECTED = "based on expected activations; only mu_max is a limit"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], False),
        (["--set", 'rule={ name = "t-sync", t = 2 }'], False),  # both clients
        (["--set", "rule.name=async"], True),
        (["--set", "rule.name=async", "--epochs", "3"], False),
        (["--set", "stop.seconds=9.0"], True),
        (["--set", "evaluation.every_seconds=1.0", "--epochs", "3"], True),
    ],
)
def test_expected_counts_are_not_shown_as_bounds(config, capsys, arguments, expected):
    """One of six async runs used a record 3 times instead of the planned 2."""
    assert (EXPECTED in calibrated(capsys, config, "--mu", "1", *arguments)["notes"]) == expected


def test_the_tables_say_what_holds_and_what_does_not(config, capsys):
    assert main(["calibrate", config, "--epsilon", "4", "--set", "privacy.noise=2.0"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "epsilon 4 at delta 1e-05" in text
    assert "not valid" in text
    for mode in ("release_once", "frozen", "dp_train", "embed_only"):
        assert mode in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "VFL-9021"),
        (["--mu", "1", "--set", "privacy.clip=-1"], "privacy.clip must be 0 or more. Found -1"),
        (
            ["--mu", "1", "--set", "privacy.neighbours=swap"],
            "privacy.neighbours must be one of zero_out, replace",
        ),
        (["--mu", "1", "--set", "privacy.clp=5.0"], 'unknown key "privacy.clp". Did you mean "clip"?'),
        (["--mu", "1", "--set", "privacy.mode=frozn"], "privacy.mode must be one of"),
        (
            ["--mu", "1", "--set", "privacy.mode=frozen", "--set", "privacy.gradient_clip=2.0"],
            "makes no use of",
        ),
        (["--mu", "1", "--set", "privacy=3"], "privacy must be a section"),
        (["--mu", "1", "--delta", "2"], "delta must be between 0 and 1"),
        (["--mu", "-1"], "mu must be 0 or more. Found -1"),
        (["--mu", "1", "--set", "rule.name=centralised"], "uploads nothing"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(config, capsys, arguments, message):
    assert main(["calibrate", config, *arguments]) == 2
    assert message in capsys.readouterr().err
