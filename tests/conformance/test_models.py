"""Every embedding, head, combination and loss learns in a federation."""

from dataclasses import replace

import pytest

from tests.federation import parameters, same
from vafl.config import from_document
from vafl.data.partition import partition
from vafl.data.public import load
from vafl.data.settings import DataSettings, PartitionSettings
from vafl.data.split import Split
from vafl.run.assembly import build

pytestmark = pytest.mark.no_cover  # many runs of the same lines
LAYOUTS = {"linear": "columns", "mlp": "columns", "cnn": "bands", "lstm": "sequence"}
HEADS = [("bias", "sum"), ("linear", "sum"), ("linear", "concat"), ("mlp", "sum"), ("mlp", "concat")]
HEADS += [("gated", "concat")]
SIZES = {"linear": [], "mlp": [32], "cnn": [8, 8], "lstm": [8]}


def data(name, layout="columns"):
    source = load(DataSettings(name))
    split = Split.of_dataset(source, DataSettings(name), 0)
    return partition(source, split, PartitionSettings(clients=2, layout=layout))


def scaled_labels(source):
    """Return diabetes with scaled labels, which are in the hundreds, so that one step size fits all."""
    return replace(source, labels=(source.labels - 150) / 80)


DIGITS = {layout: data("digits", layout) for layout in set(LAYOUTS.values())}
TABLES = {
    "binary": data("breast_cancer"),
    "softmax": data("wine"),
    "squared": scaled_labels(data("diabetes")),
}


def trained(source, embedding, model, updates, step_size):
    run = build(
        from_document(
            {
                "embedding": embedding,
                "model": model,
                "schedule": {"batch_size": 50},
                "optimiser": {"name": "Adam", "step_size": step_size},
                "delays": {"kind": "exponential"},
                "stop": {"updates": updates},
                "evaluation": {"every": updates},
            }
        ),
        source,
    )
    before = parameters(run)
    points = run.train()
    assert not any(same(old, new) for old, new in zip(before, parameters(run), strict=True)), "all have moved"
    return points


@pytest.mark.parametrize(("head", "combine"), HEADS)
@pytest.mark.parametrize("embedding", LAYOUTS)
def test_digits_are_learnt_by_every_model(embedding, head, combine):
    network, model = {"model": embedding, "hidden": SIZES[embedding]}, {"head": head, "combine": combine}
    start, end = trained(DIGITS[LAYOUTS[embedding]], network, model, updates=120, step_size=0.02)
    assert start.metric < 0.3
    assert end.metric > (0.5 if embedding in ("cnn", "lstm") else 0.8)


@pytest.mark.parametrize(("loss", "good"), [("binary", 0.9), ("softmax", 0.9), ("squared", 0.3)])
@pytest.mark.parametrize(("head", "combine"), HEADS)
@pytest.mark.parametrize("embedding", ["linear", "mlp"])
def test_tables_are_learnt_under_every_loss(embedding, head, combine, loss, good):
    network = {"model": embedding, "hidden": SIZES[embedding]}
    model = {"head": head, "combine": combine, "loss": loss}
    # Gates multiply, so a gated head needs smaller steps.
    steps = {"updates": 120, "step_size": 0.02} if head == "gated" else {"updates": 60, "step_size": 0.05}
    _, end = trained(TABLES[loss], network, model, **steps)
    assert end.metric > good


def test_a_module_of_the_users_own_learns():
    network = {"model": "tests.models.factories:scaled"}
    model = {"head": "linear", "combine": "concat"}
    assert trained(DIGITS["columns"], network, model, updates=100, step_size=0.02)[-1].metric > 0.8


def test_perturbed_embeddings_still_learn():
    run = build(
        from_document(
            {
                "privacy": {"mode": "embed_only", "clip": 5.0, "noise": 0.1},
                "schedule": {"batch_size": 100},
                "optimiser": {"step_size": 0.5},
                "stop": {"updates": 200},
                "evaluation": {"every": 200},
            }
        ),
        DIGITS["columns"],
    )
    assert run.train()[-1].metric > 0.75
