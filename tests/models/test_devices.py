"""The border between the CPU and an accelerator, which tests on machines without one pretend to have."""

import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

from tests.federation import run_of, vertical_data
from tests.kinds import KINDS, kinds_document
from tests.models.pretended import DEVICE, Elsewhere, Pretended
from vafl.config import from_document
from vafl.errors import ConfigError
from vafl.models import devices
from vafl.models.decisions import Decision
from vafl.models.devices import moved, on_device
from vafl.models.embeddings import lstm
from vafl.models.settings import EmbeddingSettings
from vafl.run.agreement import make_terms
from vafl.run.assembly import build, make_client
from vafl.run.client import ClientState
from vafl.run.continued import EarlierRun
from vafl.run.model_store import keep_all, open_model, rebuild
from vafl.run.plan import make_plan
from vafl.run.predict import Deployed


@pytest.fixture
def accelerator(monkeypatch):
    """Pretend that this machine has one CUDA device."""
    monkeypatch.setattr(devices, "_is_present", lambda device: device.type == "cuda")
    with Pretended():
        yield


def device_of(model):
    return next(model.parameters()).device.type


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps"])
def test_a_device_that_is_not_there_is_refused(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: name == "cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f'VFL-3027.*"{name}"'):
        on_device(nn.Linear(2, 1), EmbeddingSettings(device=name))


@pytest.mark.parametrize(
    "model", ["cnn", "lstm", "transformer", "my.networks:scans", "mlp", "tabular", "auto"]
)
def test_auto_falls_back_to_the_cpu(monkeypatch, model):
    monkeypatch.setattr(devices, "_is_present", lambda device: False)
    module = nn.Linear(2, 1)
    assert on_device(module, EmbeddingSettings(model=model)) is module
    assert device_of(module) == "cpu"
    assert not module._forward_hooks


@pytest.mark.parametrize(
    ("model", "place"), [("cnn", "cuda"), ("my.networks:scans", "cuda"), ("mlp", "cpu"), ("tabular", "cpu")]
)
def test_auto_uses_an_accelerator_for_large_models_only(accelerator, model, place):
    assert device_of(on_device(nn.Linear(2, 1), EmbeddingSettings(model=model))) == place


def test_noise_needs_the_cpu(accelerator):
    settings = EmbeddingSettings(model="cnn")
    assert device_of(on_device(nn.Linear(2, 1), settings, adds_noise=True)) == "cpu"
    with pytest.raises(ConfigError, match=r'VFL-3028.*"cuda"'):
        on_device(nn.Linear(2, 1), EmbeddingSettings(model="cnn", device="cuda"), adds_noise=True)
    embedding = {"model": "cnn", "hidden": [4]}
    run = run_of(
        vertical_data(shape=(1, 4, 4)), embedding=embedding, privacy={"mode": "embed_only", "noise": 0.1}
    )
    assert device_of(run.models[0]) == "cpu"
    run.train()


def test_outside_the_border_everything_is_on_the_cpu(accelerator):
    model = lstm((4, 2), 3, [5])
    names, features = list(model.state_dict()), torch.randn(6, 4, 2)
    expected = model(features)
    moved(model, DEVICE)
    assert list(model.state_dict()) == names
    embeddings = model(features)
    assert not isinstance(embeddings, Elsewhere)
    assert torch.allclose(embeddings, expected)
    gradients = torch.autograd.grad(embeddings.sum(), list(model.parameters()))
    reference = lstm((4, 2), 3, [5])
    reference.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    others = torch.autograd.grad(reference(features).sum(), list(reference.parameters()))
    assert all(torch.allclose(one.cpu(), two) for one, two in zip(gradients, others, strict=True))


def test_records_go_to_the_device_as_tensors_without_values_show():
    """The meta device has no values, so this model can only return shapes; nothing is on the CPU inside."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    seen = []
    model[2].register_forward_hook(
        lambda layer, inputs, outputs: seen.append((inputs[0].device, outputs.device))
    )
    moved(model, torch.device("meta"))
    with pytest.raises(NotImplementedError, match="meta"):  # `cpu()` has nothing to copy
        model(torch.randn(5, 3))
    assert seen == [(torch.device("meta"),) * 2]


def test_a_model_with_a_border_is_copied_and_pickled():
    model = moved(nn.Linear(3, 2), torch.device("cpu"))
    features = torch.randn(5, 3)
    for copied in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(features), model(features))
        assert len(copied._forward_hooks) == len(copied._forward_pre_hooks) == 1


MODELS = {"cnn": (1, 4, 4), "lstm": (4, 2), "transformer": (4, 2), "mlp": (3,), "linear": (3,)}
OPTIMISERS = [
    {},
    {"options": {"momentum": 0.5}},
    {"name": "AdamW", "average": True},
    {"name": "RMSprop", "step_size": 0.01},
]


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_run_on_a_device_ends_as_on_the_cpu(monkeypatch, tmp_path, model, optimiser):
    monkeypatch.setattr(devices, "_is_present", lambda device: True)
    ends = []
    for device in ("cpu", "cuda:0"):
        with Pretended():
            run = run_of(
                vertical_data(shape=MODELS[model]),
                embedding={"model": model, "hidden": [4], "device": device},
                model={"head": "linear", "combine": "concat", "width": 2},
                optimiser=optimiser,
            )
            assert device_of(run.models[0]) == device.partition(":")[0]
            run.train()
            keep_all(run, Decision(), tmp_path / device)
        ends.append(rebuild(open_model(tmp_path / device, "client-1"))(run.data.parties[0].features))
    assert torch.allclose(*ends, atol=1e-4)


def test_models_of_every_kind_are_trained_stored_continued_and_used_on_a_device(accelerator, tmp_path):
    whole = kinds_document(tmp_path)
    for name in KINDS:
        whole["parties"][name]["embedding"]["device"] = "cuda"
    config = from_document(whole)
    run = build(config)
    run.train()
    keep_all(run, Decision(), tmp_path / "run")
    again = build(config, beginning=EarlierRun(tmp_path / "run", config))
    for index, name in enumerate(KINDS):
        client = Deployed.load(config, name, tmp_path / "run").prediction_client()
        assert device_of(client.model) == device_of(again.models[index]) == "cuda"
        embeddings = client._embedded(client.model, client._features, None, evaluating=True)
        on_the_cpu = rebuild(open_model(tmp_path / "run", name))(client._features)
        assert torch.allclose(torch.from_numpy(embeddings), on_the_cpu, atol=1e-5)
        assert torch.allclose(again.models[index].eval()(client._features), on_the_cpu, atol=1e-5)


def test_a_client_on_a_device_resumes_from_its_checkpoint(accelerator, tmp_path):
    document = {
        "data": {"name": "iris"},
        "embedding": {"model": "mlp", "hidden": [4], "device": "cuda"},
        "optimiser": {"name": "AdamW", "average": True},
        "model": {"head": "linear", "width": 2},
    }
    plan = make_plan(from_document(document))
    client, terms = make_client(plan, 0), make_terms(plan)
    ClientState(client, tmp_path, 1, terms, resume=False)
    again = make_client(make_plan(from_document({**document, "seed": 5})), 0)
    ClientState(again, tmp_path, 1, terms, resume=True)
    features = plan.data.parties[0].features
    assert torch.equal(again.model(features), client.model(features))
