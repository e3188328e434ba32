"""Pretrained weights and frozen layers, from the module to whole runs."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.federation import run_of, vertical_data
from vafl.config import from_document
from vafl.errors import ConfigError
from vafl.models.embeddings import make_embedding, mlp
from vafl.models.pretrained import prepared, start_near_zero
from vafl.models.settings import EmbeddingSettings
from vafl.models.tabular import CategoryInput, NumberInput
from vafl.run.agreement import make_terms
from vafl.run.assembly import make_client
from vafl.run.checkpoint import load_checkpoint
from vafl.run.client import ClientState
from vafl.run.plan import make_plan

INPUTS = (NumberInput((0.0, 1.0, 2.0), 0.0, False), CategoryInput(3))
NETWORKS = {
    "linear": ((6,), ["weight", "bias"]),
    "mlp": ((6,), ["2.weight", "2.bias"]),
    "cnn": ((1, 4, 4), ["2.weight", "2.bias"]),
    "lstm": ((4, 2), [f"second.{name}_l0" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]),
    "transformer": ((4, 2), ["last.weight", "last.bias"]),
    "tabular": ((2,), ["network.3.weight", "network.3.bias", "linear.weight"]),
}


def settings_of(name, **more):
    hidden = {"hidden": (4,)} if name != "linear" else {}
    return EmbeddingSettings(**{"model": name, **hidden, **more})


def made(name, *, absent=False, **more):
    shape, _ = NETWORKS[name]
    settings, inputs = settings_of(name, **more), INPUTS if name == "tabular" else ()
    flat = (int(np.prod(shape)) + 1,)
    model = make_embedding(settings, flat if absent else shape, 3, inputs, record_shape=shape)
    return prepared(model, settings)


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("absent", [False, True])
def test_which_parameters_are_trained(name, absent):
    absent = absent and name != "tabular"  # its absent records are an ordinary category
    prefix, own = ("inner.", {"default"}) if absent else ("", set())
    whole = made(name, absent=absent)
    assert trained(whole) == set(dict(whole.named_parameters()))
    assert (
        trained(made(name, absent=absent, train="last"))
        == {prefix + last for last in NETWORKS[name][1]} | own
    )
    assert trained(made(name, absent=absent, train="none")) == own


@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_may_start_near_zero_and_still_learns(name):
    shape, last = NETWORKS[name]
    torch.manual_seed(0)
    model = made(name).eval()
    features = torch.rand(50, *shape).round() if name == "tabular" else torch.randn(50, *shape)
    before = model(features).abs().max()
    start_near_zero(model)
    embeddings = model(features)
    assert embeddings.abs().max() < 0.05 * before
    embeddings.sum().backward()
    gradients = dict(model.named_parameters())
    assert all(gradients[name].grad.abs().max() > 0 for name in last if name in gradients)
    frozen = made(name, train="none")
    state = {key: value.clone() for key, value in frozen.state_dict().items()}
    start_near_zero(frozen)
    assert all(torch.equal(value, state[key]) for key, value in frozen.state_dict().items())


class Normalised(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize(("train", "frozen"), [("all", []), ("last", [1]), ("none", [1, 4])])
def test_the_statistics_of_frozen_layers_stay(train, frozen):
    """With the statistics of each batch, a frozen layer would give another output at every step."""
    model = prepared(Normalised(), EmbeddingSettings(model="a:b", train=train))
    before = {name: value.clone() for name, value in model.named_buffers()}
    features = 5 + torch.randn(20, 3)
    model.train()
    first = model(features)[:5]
    for place in (1, 4):
        kept = torch.equal(model[place].running_mean, before[f"{place}.running_mean"])
        assert kept == (place in frozen)
    if train == "none":
        assert torch.equal(model(features[:5]), first)


def write(folder, tensors):
    save_file(tensors, folder / "weights.safetensors")
    return str(folder / "weights.safetensors")


@pytest.mark.parametrize("absent", [False, True])
def test_pretrained_weights_are_found_by_name_and_the_rest_starts_as_usual(tmp_path, absent):
    pretrained = mlp((6,), 9, [4])  # of another width
    tensors = {name: value for name, value in pretrained.state_dict().items() if not name.startswith("2.")}
    torch.manual_seed(1)
    model = made("mlp", absent=absent, weights=write(tmp_path, tensors))
    torch.manual_seed(1)
    fresh = made("mlp", absent=absent)
    state, usual = model.state_dict(), fresh.state_dict()
    prefix = "inner." if absent else ""
    for name, value in usual.items():
        assert torch.equal(state[name], tensors.get(name.removeprefix(prefix), value))


def test_weights_of_half_precision_are_converted(tmp_path):
    tensors = {"weight": torch.full((3, 6), 0.5, dtype=torch.float16), "bias": torch.ones(3).bfloat16()}
    model = made("linear", weights=write(tmp_path, tensors))
    assert model.weight.dtype == model.bias.dtype == torch.float32
    assert model.weight.unique().tolist() == [0.5]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "VFL-3023"),
        (b"", "VFL-3023"),
        (b"no tensors at all", "VFL-3023"),
        ({}, "VFL-3026"),
        (
            {"0.weight": torch.zeros(4, 6), "inner.0.bias": torch.zeros(4)},
            r"VFL-3024.*inner\.0\.bias.*0\.weight",
        ),
        ({"0.weight": torch.zeros(4, 5)}, r"VFL-3025.*0\.weight.*\[4, 6\].*\[4, 5\]"),
        ({"2.bias": torch.zeros(3, 1)}, r"VFL-3025.*2\.bias"),
    ],
    ids=["no file", "empty", "text", "no tensors", "wrong name", "wrong shape", "wrong axes"],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, content, code):
    path = tmp_path / "weights.safetensors"
    if isinstance(content, dict):
        save_file(content, path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=code):
        made("mlp", weights=str(path))
    with pytest.raises(ConfigError, match="VFL-3023"):
        made("mlp", weights=str(tmp_path))


EVERYTHING = {
    "name": "AdamW",
    "step_size": 0.05,
    "average": True,
    "l2": 0.1,
    "options": {"weight_decay": 0.5},
}


def states(run):
    return [{name: value.clone() for name, value in model.state_dict().items()} for model in run.models]


@pytest.mark.parametrize(
    "sections",
    [
        {"rule": {"name": "async"}},
        {"rule": {"name": "async", "local_steps": 3}},
        {"rule": {"name": "async", "order": "query-first"}},
        {"rule": {"name": "t-sync", "t": 2}},
        {"rule": {"name": "sync"}},
        {"rule": {"name": "centralised"}},
        {"privacy": {"mode": "embed_only", "clip": 1.0, "noise": 0.1}},
        {"privacy": {"mode": "release_once", "clip": 1.0, "noise": 0.1, "mu_max": "unlimited"}},
        {"privacy": {"mode": "frozen", "clip": 1.0, "noise": 0.1, "mu_max": "unlimited"}},
        {
            "privacy": {
                **{"mode": "dp_train", "clip": 1.0, "noise": 0.1, "mu_max": "unlimited"},
                **{"gradient_clip": 1.0, "gradient_noise": 0.1},
            }
        },
    ],
    ids=lambda sections: "-".join(map(str, next(iter(sections.values())).values())),
)
@pytest.mark.parametrize("train", ["last", "none"])
@pytest.mark.parametrize("average", [False, True])
def test_nothing_moves_a_frozen_parameter(sections, train, average):
    """Neither the optimiser, its weight decay, the regulariser nor the average of the parameters moves it."""
    embedding = {"model": "mlp", "hidden": [4], "train": train}
    optimiser = {**EVERYTHING, "average": average}
    model = {"head": "linear", "combine": "concat", "width": 2}
    run = run_of(vertical_data(), embedding=embedding, optimiser=optimiser, model=model, **sections)
    before, head = states(run), [value.clone() for value in run.head.parameters()]
    run.train()
    assert any(not torch.equal(old, new) for old, new in zip(head, run.head.parameters(), strict=True))
    learns = train == "last" and sections.get("privacy", {}).get("mode") != "frozen"
    for earlier, model in zip(before, run.models, strict=True):
        moved = {name for name, value in model.state_dict().items() if not torch.equal(value, earlier[name])}
        assert moved == ({"2.weight", "2.bias"} if learns else set())


@pytest.mark.parametrize("train", ["all", "last", "none"])
def test_a_resumed_client_trains_the_frozen_layers_that_it_had(tmp_path, train):
    """They may come from a file that has changed, or from an earlier run: a resumed run reads neither."""
    document = {
        "data": {"name": "iris"},
        "embedding": {"model": "mlp", "hidden": [4], "train": train},
        "optimiser": {"name": "AdamW", "step_size": 0.1, "average": True},
        "model": {"head": "linear", "width": 2},
    }
    plan = make_plan(from_document(document))
    client, terms = make_client(plan, 0), make_terms(plan)
    features = plan.data.parties[0].features
    with torch.no_grad():
        for model in (plan.models[0], client.descent.trains(plan.models[0])):
            model[0].weight.copy_(torch.arange(8.0).reshape(4, 2))  # as if an earlier run had trained it
    expected = client.descent.trains(client.model)(features)
    ClientState(client, tmp_path, 1, terms, resume=False)
    assert "model.0.weight" in load_checkpoint(tmp_path)[0]
    again = make_client(make_plan(from_document({**document, "seed": 5})), 0)
    ClientState(again, tmp_path, 1, terms, resume=True)
    assert torch.equal(again.model(features), client.model(features))
    assert torch.equal(again.descent.trains(again.model)(features), expected)
