"""`vafl inspect` and `vafl export`: every kind of model, from nothing but its folder."""

import json

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from tests.federation import run_of, vertical_data
from vafl.cli import main
from vafl.models.decisions import Decision
from vafl.run.model_store import keep_all


def kept(path, shape, embedding=(), **model):
    run = run_of(vertical_data(shape=shape), embedding=dict(embedding), model=model)
    run.train()
    keep_all(run, Decision(), path)
    return run


@pytest.mark.no_cover  # most of it is torch's
@pytest.mark.parametrize(
    ("embedding", "shape"), [("linear", (3,)), ("mlp", (2, 3)), ("cnn", (1, 4, 6)), ("lstm", (5, 3))]
)
def test_an_exported_embedding_gives_what_the_model_gives(tmp_path, embedding, shape):
    run = kept(tmp_path, shape, {"model": embedding, "hidden": [4]}, head="linear", width=5)
    assert main(["export", str(tmp_path), "client-2", str(tmp_path / "out.onnx")]) == 0
    features = torch.randn(7, *shape)
    (found,) = ReferenceEvaluator(str(tmp_path / "out.onnx")).run(None, {"features": features.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), run.models[1].eval()(features).detach())
    facts = {entry.key: entry.value for entry in onnx.load(tmp_path / "out.onnx").metadata_props}
    assert facts["vafl.party"] == "client-2"


def test_the_head_is_exported_and_inspected(tmp_path, capsys):
    run = kept(tmp_path, (3,), head="mlp", head_hidden=[4], combine="concat", width=2)
    assert main(["export", str(tmp_path), "server", str(tmp_path / "head.onnx")]) == 0
    inputs = torch.randn(3, 4)
    (found,) = ReferenceEvaluator(str(tmp_path / "head.onnx")).run(None, {"features": inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), run.head(inputs).detach())
    capsys.readouterr()
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    models = {model["party"]: model for model in json.loads(capsys.readouterr().out)["models"]}
    assert set(models) == {"client-1", "client-2", "server"}
    assert models["server"]["defaults"] == ["client-1", "client-2"]
    assert len({model["config_digest"] for model in models.values()}) == 1
    assert main(["inspect", str(tmp_path / "models" / "client-1")]) == 0
    assert "linear" in capsys.readouterr().out


def test_what_is_no_model_is_refused(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 5
    assert main(["export", str(tmp_path), "bank", str(tmp_path / "out.onnx")]) == 5
    assert main(["export", str(tmp_path), "bank", str(tmp_path / "out.txt")]) == 2
    assert not list(tmp_path.iterdir())
    assert "must end in .onnx" in capsys.readouterr().err
