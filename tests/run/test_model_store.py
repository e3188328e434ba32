"""Models from folders that someone else may have written: no edit of them runs code or crashes."""

import copy
import importlib
import json
import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from datetime import date

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.companies import configuration, write_companies
from tests.federation import run_of, vertical_data
from tests.models.forged import read_document, write_document
from tests.waiting import LIMIT
from vafl.cli import main
from vafl.commands.inspect import describe, table_of
from vafl.errors import RunFolderError
from vafl.models.decisions import Decision
from vafl.models.store import read_model
from vafl.run.assembly import build
from vafl.run.model_store import keep_all, model_folder, rebuild

FACTORY = "tests.models.factories:scaled"


def _sections(embedding, *hidden, **model):
    return {"embedding": {"model": embedding, "hidden": list(hidden)}, "model": model}


KINDS = {
    "linear": ((3,), {}),
    "mlp": ((2, 3), _sections("mlp", 4, head="mlp", combine="concat")),
    "cnn": ((1, 4, 6), _sections("cnn", 2, head="linear", width=3)),
    "lstm": ((5, 3), _sections("lstm", 2, head="linear", width=3)),
    "transformer": ((5, 3), _sections("transformer", 4, head="linear", width={"client-1": 3, "client-2": 3})),
    "gated": ((3,), _sections("mlp", 4, head="gated", combine="concat")),
    "factory": ((3,), _sections(FACTORY, head="linear", width=3)),
}


def kept(path, kind):
    shape, sections = KINDS[kind]
    run = run_of(vertical_data(shape=shape), **sections)
    keep_all(run, Decision(), path)
    return run


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders with client models and heads of every kind, including table models with encoders."""
    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        kept(root / kind, kind)
    write_companies(root / "companies")
    keep_all(build(configuration(root / "companies")), Decision(), root / "tables")
    runs = {kind: root / kind for kind in [*KINDS, "tables"]}
    parties = {"tables": ("bank", "shop", "server")}
    return [
        model_folder(run, party)
        for kind, run in runs.items()
        for party in parties.get(kind, ("client-2", "server"))
    ]


# --- a factory is imported only if the user names it ---


def use(folder, factory=""):
    """Do everything that commands do with a model folder, and return the module."""
    stored = read_model(folder)
    json.dumps(describe(stored))
    table_of([stored])
    module = rebuild(stored, factory)
    with torch.no_grad():
        module(torch.zeros(2, *stored.manifest.features))
    widths = dict(zip(stored.manifest.parties, stored.manifest.widths, strict=True))
    assert all(default.shape == (widths[party],) for party, default in stored.defaults.items())
    return module


def test_every_kind_of_model_comes_back(folders):
    for folder in folders:
        use(folder, FACTORY)


def test_export_runs_no_code_that_a_manifest_names(tmp_path):
    """Run the real command. The planted module would create a file."""
    kept(tmp_path / "run", "linear")
    (tmp_path / "planted.py").write_text(
        "from pathlib import Path\n"
        f"Path({str(tmp_path / 'ran')!r}).touch()\n"
        "def Factory(shape, width):\n    raise SystemExit('called')\n"
    )
    folder = model_folder(tmp_path / "run", "client-1")
    document = read_document(folder)
    document["embedding"]["model"] = "planted:Factory"
    write_document(folder, document)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    for command in (["export", "run", "client-1", "out.onnx"], ["inspect", "run"]):
        result = subprocess.run(
            [sys.executable, "-m", "vafl.cli", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert not (tmp_path / "ran").exists(), command
        if command[0] == "export":
            assert result.returncode == 5, result.stderr
            assert "--embedding planted:Factory" in " ".join(result.stderr.split())
    assert not (tmp_path / "out.onnx").exists()


def test_a_factory_that_the_user_names_is_used(tmp_path):
    kept(tmp_path / "run", "factory")
    export = ["export", str(tmp_path / "run"), "client-1", str(tmp_path / "out.onnx")]
    assert main(export) == 5
    assert main([*export, "--embedding", "tests.models.factories:on_frozen"]) == 5
    assert not (tmp_path / "out.onnx").exists()
    assert main([*export, "--embedding", FACTORY]) == 0
    assert (tmp_path / "out.onnx").stat().st_size > 100


def test_a_head_needs_no_factory(folders):
    (head,) = (folder for folder in folders if folder.parts[-3::2] == ("factory", "server"))
    use(head)


def test_the_configuration_in_the_run_folder_is_not_the_users_own(tmp_path, capsys):
    """It comes with the model, so it does not prove that the user trusts the factory."""
    config, run = tmp_path / "run.toml", str(tmp_path / "run")
    config.write_text(
        f'[embedding]\nmodel = "{FACTORY}"\n[model]\nhead = "linear"\n'
        '[data]\nname = "iris"\n[stop]\nupdates = 5\n'
    )
    assert main(["run", str(config), "--out", run]) == 0
    options = ["--party", "client-1", "--model", run]
    assert main(["predict", f"{run}/config.toml", *options]) == 2
    assert f"--set embedding.model={FACTORY}" in " ".join(capsys.readouterr().err.split())
    named = ["--set", f"embedding.model={FACTORY}"]
    for own in ([f"{run}/config.toml", *options, *named], [str(config), *options]):
        assert main(["predict", *own]) == 2
        assert "vafl certs" in capsys.readouterr().err, "the next thing that is missing are certificates"


# --- every edit gives a VaflError, or a model that works ---

EDITS = [
    ("party", "server"),
    ("party", "client-9"),
    ("party", "../../../esc"),
    ("kind", "head"),
    ("kind", "tail"),
    ("features", "3"),
    ("features", []),
    ("features", [0]),
    ("features", [-3]),
    ("features", [True]),
    ("features", [3.0]),
    ("features", [2**62]),
    ("features", [4096] * 4),
    ("features", [1] * 50),
    ("outputs", 0),
    ("outputs", -1),
    ("outputs", True),
    ("outputs", 2**70),
    ("outputs", 2),
    ("classes", [1, 2, 3]),
    ("classes", ["a"]),
    ("classes", ["a", "a", "b"]),
    ("classes", ["a", "b"]),
    ("classes", "abc"),
    ("parties", []),
    ("parties", ["client-1", "client-1"]),
    ("parties", ["client-1", "server"]),
    ("parties", ["client-1", "../esc"]),
    ("parties", [1, 2]),
    ("parties", {"client-1": 1}),
    ("widths", []),
    ("widths", [3, 0]),
    ("widths", [3, True]),
    ("widths", [3, 2**40]),
    ("widths", {"client-1": 3}),
    ("shapes", {}),
    ("shapes", {"weight": [3, -3]}),
    ("shapes", {"weight": "3 3"}),
    ("run", "\x1b[31m"),
    ("run", 7),
    ("records", [1]),
    ("parameters", ""),
    ("settings", {}),
    ("settings", {"model": 3}),
    ("settings", {"model": {"colour": "red"}}),
    ("embedding", {"model": 3}),
    ("embedding", {"model": "mlp", "hidden": "64"}),
    ("embedding", {"model": "mlp", "hidden": [10**30]}),
    ("embedding", {"model": "mlp", "hidden": [2] * 100_000}),
    ("settings", {"model": {"width": 10**30, "head": "linear"}}),
    ("embedding", {"model": "cnn"}),
    ("embedding", {"model": "lstm"}),
    ("settings", {"model": {"loss": "binary"}}),
    ("settings", {"model": {"loss": "squared"}}),
    ("settings", {"model": {"head": "bias", "combine": "concat"}}),
    ("embedding", {"model": "subprocess:call"}),
    ("embedding", {"model": "os:system"}),
    ("embedding", {"model": "..os:system"}),
    ("settings", {"model": {}, "data": 3}),
    ("settings", {"model": {}, "data": {"name": date(2026, 1, 1)}}),
    ("schema", {"columns": 3, "flags_absent": False}),
    ("schema", {"columns": [3], "flags_absent": False}),
    ("schema", {"columns": [{"kind": "os"}], "flags_absent": False}),
    ("schema", {"columns": [{"kind": ["number"]}], "flags_absent": False}),
    ("schema", {"columns": [], "flags_absent": "yes"}),
    ("schema", {"columns": [{"name": "x"}]}),
    ("colour", "red"),
]


@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_an_edit_is_refused_by_name(folders, edit, no_imports):
    client, head = folders[:2]  # linear
    with edited(client, {**read_document(client), edit[0]: edit[1]}), pytest.raises(RunFolderError):
        use(client)
    with edited(head, {**read_document(head), edit[0]: edit[1]}):
        refused_or_works(head)


def test_nesting_beyond_any_manifest_is_refused(folders, no_imports):
    folder, deep = folders[0], {"value": 1}
    for _ in range(400):
        deep = {"a": deep}
    nested, dotted, digits = b"x = " + b"[" * 100_000, b"a." * 5_000 + b"a = 1", b"x = " + b"9" * 10_000
    with edited(folder, {**read_document(folder), "settings": {"model": {}, "data": deep}}):
        for text in (None, nested, dotted, digits):
            if text is not None:
                (folder / "manifest.toml").write_bytes(text)
            with pytest.raises(RunFolderError):
                read_model(folder)


@pytest.fixture
def no_imports(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", refuse_import)


def refuse_import(name, *others):
    raise AssertionError(f"{name} was imported because a file says so")


@contextmanager
def edited(folder, document):
    """Replace the manifest of a folder inside the block."""
    before = (folder / "manifest.toml").read_bytes()
    write_document(folder, document)
    try:
        yield
    finally:
        (folder / "manifest.toml").write_bytes(before)


def refused_or_works(folder):
    with suppress(RunFolderError):
        use(folder)


numbers = st.integers(-3, 7) | st.sampled_from([2**31, 2**63, 2**64, 10**30]) | st.floats()
known = ["linear", "mlp", "cnn", "lstm", "head", "embedding", "concat", "number", "client-1", "server"]
hostile = ["", "../esc", "subprocess:call", "os:system", "a.b:c", FACTORY, "x" * 300]
texts = st.sampled_from(known + hostile) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
scalars = numbers | texts | st.booleans() | st.dates()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def places(document, at=()):
    """Yield every path into nested dictionaries and lists."""
    yield at
    entries = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in entries if isinstance(document, dict | list) else ():
        if isinstance(value, dict | list):
            yield from places(value, (*at, key))
        else:
            yield (*at, key)


def replaced(document, place, value):
    """Return the document with another value at a path; None removes the entry."""
    *way, last = place
    inner = document
    for key in way:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return document


@settings(suppress_health_check=[*HealthCheck], max_examples=300)
@given(data=st.data())
def test_random_edits_are_refused_by_name_or_leave_a_working_model(folders, data):
    folder = data.draw(st.sampled_from(folders))
    document = copy.deepcopy(read_document(folder))
    for _ in range(data.draw(st.integers(1, 3))):
        found = [place for place in places(document) if place and place[0] != "format"]
        place = data.draw(st.sampled_from(found))
        document = replaced(document, place, data.draw(st.none() | values))
    with pytest.MonkeyPatch.context() as patch, edited(folder, document):
        patch.setattr(importlib, "import_module", refuse_import)
        refused_or_works(folder)


def test_inspect_shows_every_kind(folders, capsys):
    for folder in folders:
        assert main(["inspect", str(folder)]) == 0
        assert main(["inspect", str(folder), "--json"]) == 0
    assert "income" in capsys.readouterr().out
