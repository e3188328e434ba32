"""Model folders are read back as written; damaged folders and folders of other models are rejected."""

import tomllib

import pytest
import tomli_w
import torch
from torch import nn

from tests.models.forged import read_document, write_document
from vafl.errors import RunFolderError
from vafl.models.decisions import Decision
from vafl.models.probabilities import Calibration
from vafl.models.store import FORMAT, MANIFEST, TENSORS, read_model, write_model

FACTS = {
    "party": "server",
    "kind": "head",
    "run": "123",
    "records": "abc",
    "features": [3],
    "outputs": 2,
    "classes": ["no", "yes"],
    "parties": ["bank", "shop"],
    "widths": [3, 3],
    "settings": {"model": {"width": 3, "head": "linear", "loss": "softmax"}},
    "schema": {"columns": ["age", "income", "town"]},
    "decision": Decision(Calibration("platt", 0.5, (0.0, -1.25)), 0.1),
    "source": {},
    "embedding": {},
}


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "server", nn.Linear(3, 2), {"shop": torch.tensor([1.0, 2.0, 3.0])}, **FACTS)
    return tmp_path / "server"


def test_what_was_written_is_read_back(folder):
    stored, module = read_model(folder), nn.Linear(3, 2)
    stored.load_into(module)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, stored.tensors[name])
    assert {name: getattr(stored.manifest, name) for name in FACTS} == FACTS
    assert stored.defaults["shop"].tolist() == [1.0, 2.0, 3.0]
    assert stored.manifest.size == 8
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, TENSORS]


@pytest.mark.parametrize("widths", [[3], [0, 5], [2, 3.0], [2, 4], [2**21, 1]])
def test_a_head_needs_the_width_of_every_party(tmp_path, widths):
    model = {"head": "linear", "combine": "concat", "loss": "softmax", "width": {"bank": 2, "shop": 3}}
    facts = {**FACTS, "features": [5], "widths": [2, 3], "settings": {"model": model}}
    defaults = {"bank": torch.zeros(2), "shop": torch.zeros(3)}
    write_model(tmp_path, nn.Linear(5, 2), defaults, **facts)
    assert [len(default) for default in read_model(tmp_path).defaults.values()] == [2, 3]
    write_document(tmp_path, read_document(tmp_path) | {"widths": widths})
    with pytest.raises(RunFolderError, match="VFL-3043"):
        read_model(tmp_path)


def test_a_default_has_the_width_of_its_party(tmp_path):
    model = {"head": "linear", "combine": "concat", "loss": "softmax", "width": {"bank": 2, "shop": 3}}
    facts = {**FACTS, "features": [5], "widths": [2, 3], "settings": {"model": model}}
    write_model(tmp_path, nn.Linear(5, 2), {"bank": torch.zeros(3)}, **facts)
    with pytest.raises(RunFolderError, match=r"VFL-3043.*bank.*2 float32"):
        read_model(tmp_path)


def test_weights_that_are_shared_and_modules_of_any_name_come_back(tmp_path):
    def module():
        own = nn.ModuleDict({"default": nn.Linear(3, 3), "other": nn.Linear(3, 3)})
        own["other"].weight = own["default"].weight
        return own

    trained, again = module(), module()
    write_model(
        tmp_path, trained, **FACTS | {"kind": "embedding", "party": "bank", "embedding": {"model": "linear"}}
    )
    read_model(tmp_path).load_into(again)
    assert all(torch.equal(own, again.state_dict()[name]) for name, own in trained.state_dict().items())


def test_a_crash_between_the_two_files_is_noticed(folder):
    manifest = (folder / MANIFEST).read_bytes()
    write_model(folder, nn.Linear(3, 2), **FACTS)
    (folder / MANIFEST).write_bytes(manifest)
    with pytest.raises(RunFolderError, match="VFL-3043"):
        read_model(folder)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("format", FORMAT + 1, rf"VFL-3042.*format {FORMAT}\b.*format {FORMAT + 1}\b"),
        ("outputs", "two", "VFL-3043"),
        ("colour", "red", "VFL-3043"),
        ("classes", ["yes", "no"], r"VFL-3043.*manifest\.toml has changed"),
        (
            "schema",
            {"columns": ["age", "town", "income"]},
            r"VFL-3043.*manifest\.toml has changed",
        ),
        ("digest", "", r"VFL-3043.*manifest\.toml has changed"),
    ],
)
def test_a_manifest_that_says_something_else_is_refused(folder, entry, value, message):
    document = tomllib.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(tomli_w.dumps({entry: value} | {**document, entry: value}))
    with pytest.raises(RunFolderError, match=message):
        read_model(folder)


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        ({"threshold": -0.5}, "VFL-3043"),
        ({"threshold": "high"}, "VFL-3043"),
        ({"calibration": {"method": "platt", "shifts": [0.0]}}, "VFL-3043"),
        ({"calibration": {"method": "platt", "shifts": [0.0, float("nan")]}}, "VFL-3043"),
        ({"calibration": {"method": "guess"}}, "VFL-3043"),
        (
            {"calibration": {"method": "isotonic", "scores": [0.0, 1.0], "shares": [0.7, 0.2]}},
            "VFL-3043",
        ),
    ],
)
def test_a_decision_that_makes_no_sense_is_refused(folder, decision, message):
    write_document(folder, read_document(folder) | {"decision": decision})
    with pytest.raises(RunFolderError, match=message):
        read_model(folder)


@pytest.mark.parametrize("name", [MANIFEST, TENSORS])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe junk", None])
def test_missing_and_damaged_files_are_refused(folder, name, content):
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(RunFolderError, match=rf"{name}|damaged|format None"):
        read_model(folder)


def test_every_difference_is_shown(folder):
    model = FACTS["settings"]["model"]
    here = {"settings": {"model": {**model, "head": "mlp", "head_hidden": [4]}}, "outputs": 2}
    with pytest.raises(RunFolderError) as refusal:
        read_model(folder).require(here)
    assert "settings.model.head: linear in the model, mlp here" in str(refusal.value)
    assert "settings.model.head_hidden: nothing in the model, [4] here" in str(refusal.value)
    assert "outputs" not in str(refusal.value)


def test_parameters_of_other_shapes_change_nothing(folder):
    module = nn.Linear(4, 2)
    before = module.weight.detach().clone()
    with pytest.raises(RunFolderError, match="VFL-3041"):
        read_model(folder).load_into(module)
    assert torch.equal(module.weight, before)
