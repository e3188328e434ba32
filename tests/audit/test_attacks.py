import numpy as np
import pytest

from tests.federation import run_of, vertical_data
from vafl.audit.attacks import Eavesdropper, infer_labels, invert_features, replay
from vafl.audit.report import audit
from vafl.config import from_document
from vafl.errors import ConfigError
from vafl.run.assembly import build


def attacked(classes=3, **sections):
    run = run_of(
        vertical_data(200, classes=classes), stop={"updates": 150}, schedule={"batch_size": 20}, **sections
    )
    heard = Eavesdropper(run)
    run.train()
    return run, heard, run.data.labels[run.data.train].numpy().astype(np.int64)


@pytest.mark.parametrize("classes", [2, 3])
def test_plain_gradients_give_the_labels_away(classes):
    _, heard, truth = attacked(classes)
    found = {attack.name: attack for attack in infer_labels(heard, truth)}
    assert found["labels from the gradient's sign"].value == 1.0
    assert found["labels by cosine to a few known ones"].value > 0.9
    assert ("labels from the gradient's norm" in found) == (classes == 2)
    assert replay(heard, truth).value == 1.0


def test_a_head_that_turns_the_sign_round_hides_nothing():
    run = run_of(vertical_data(200, classes=2), model={"head": "linear", "width": 1}, stop={"updates": 50})
    run.head.weight.data.fill_(-5.0)
    heard, truth = Eavesdropper(run), run.data.labels[run.data.train].numpy().astype(np.int64)
    run.train()
    assert infer_labels(heard, truth)[0].value == 1.0
    assert replay(heard, truth).value == 1.0


@pytest.mark.parametrize(
    "sections",
    [
        {"rule": {"order": "query-first", "delay_bound": 2}, "delays": {"kind": "exponential"}},
        {"delays": {"latency": 0.5, "dropouts": [{"client": 1, "start": 1.55, "end": 3.55}]}},
        {"delays": {"dropouts": [{"client": 1, "start": 0.0, "end": np.inf}]}},
        {"delays": {"dropouts": [{"client": 1, "start": 9.0, "end": np.inf}]}},
    ],
    ids=["a query waits at the end", "answered twice", "never here", "gone at the end"],
)
def test_attacks_need_no_particular_run(sections):
    _, heard, truth = attacked(2, **sections)
    infer_labels(heard, truth)
    assert 0.5 <= replay(heard, truth).value <= 1


def test_drawn_labels_are_all_an_attacker_gets():
    document = {
        "labels": {"epsilon": 1.0},
        "schedule": {"batch_size": 64},
        "stop": {"updates": 300},
    }
    report = {attack.name: attack for attack in audit(from_document(document)).attacks}
    kept = 1 / (1 + 9 * np.exp(-1))
    assert report["labels from the gradient's sign"].value == pytest.approx(kept, abs=0.06)
    assert report["one embedding replayed under every id"].value == pytest.approx(kept, abs=0.06)


def test_embeddings_as_wide_as_the_features_give_the_features_away():
    wide, heard, _ = attacked(model={"head": "linear", "width": 3}, optimiser={"step_size": 0.01})
    assert invert_features(wide, heard).value > 0.8


def test_noise_hides_the_features():
    noise = {"mode": "embed_only", "clip": 1.0, "noise": 5.0}
    private, heard, _ = attacked(model={"head": "linear", "width": 3}, privacy=noise)
    assert invert_features(private, heard).value < 0.2


def test_a_regression_has_no_classes_to_infer():
    report = audit(from_document({"data": {"name": "diabetes"}, "stop": {"updates": 20}}))
    assert [attack.measure for attack in report.attacks] == ["R2"]


def test_a_run_without_privacy_claims_nothing():
    report = audit(from_document({"stop": {"updates": 100}}))
    assert report.verdict == "nothing claimed"
    assert report.findings == []
    assert "nothing is claimed" in report.silent


def test_a_centralised_run_has_nobody_to_attack():
    with pytest.raises(ConfigError, match="VFL-8801"):
        Eavesdropper(build(from_document({"rule": {"name": "centralised"}})))


def test_of_a_secure_sum_the_server_has_nothing_to_invert_but_the_sum():
    sections = {
        "rule": {"name": "sync"},
        "schedule": {"refresh": "none"},
        "partition": {"clients": 4},
        "stop": {"updates": 100},
    }
    plain = audit(from_document(sections)).attacks[-1]
    summed = audit(from_document({**sections, "privacy": {"secure_sum": True}})).attacks[-1]
    assert summed.value < plain.value
