"""Runs that start from the models of an earlier one (`--from RUN`)."""

import io
import json
import shutil
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from rich.console import Console

from tests.companies import add_own_columns, configuration, document, write_companies
from tests.federation import parameters
from tests.kinds import KINDS, kinds_configuration, kinds_document, write_kinds
from vafl.config import from_document
from vafl.data.partition import Party, VerticalData
from vafl.data.split import Parts
from vafl.errors import ConfigError, RunFolderError
from vafl.models.decisions import Decision
from vafl.models.heads import make_head
from vafl.models.pretrained import start_near_zero
from vafl.models.settings import ModelSettings
from vafl.names import LOCAL_CLIENT
from vafl.observe.record import RunFolder
from vafl.run.assembly import build, widths
from vafl.run.checkpoint import save_checkpoint
from vafl.run.continued import (
    EarlierRun,
    ResumedRun,
    beginning_of,
    copy_head,
    keep_encoder,
    require_new_models,
)
from vafl.run.launch import launch
from vafl.run.model_store import keep_all, open_model, rebuild
from vafl.run.plan import encoder_of, make_plan
from vafl.transport.grpc.terms import JOINS

CONCATENATING = ["linear", "mlp", "tabular", "gated"]
FIRST = KINDS[:3]
QUIET = {"console": Console(file=io.StringIO())}
COLUMNS = [slice(4 * number, 4 * number + 4) for number in range(5)]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Return a folder with data of every kind, and party -> its source."""
    folder = tmp_path_factory.mktemp("kinds")
    return folder, write_kinds(folder)


@pytest.fixture(scope="module")
def earlier(kinds, tmp_path_factory):
    """Return a function that trains once with the given head and parties, and returns the run folder."""
    folders = {}

    def trained(head, *parties, combine="concat"):
        key = (head, combine, *parties)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("earlier") / "run"
            train(configured(kinds, *parties, model={"head": head, "combine": combine}), folders[key])
        return folders[key]

    return trained


def configured(kinds, *parties, **sections):
    folder, sources = kinds
    sources = {name: dict(source) for name, source in sources.items()}
    return kinds_configuration(folder, *parties, sources=sources, **sections)


def begun(config, run):
    return build(config, beginning=EarlierRun(run, config))


def train(config, path, earlier=None):
    """Train, and write the models as a run folder has them."""
    run = build(config) if earlier is None else begun(config, earlier)
    run.train()
    path.mkdir()
    (path / "config.toml").write_text(config.to_toml())
    keep_all(run, Decision(), path)


def outputs(run):
    """Return the outputs of the models as they are, on the held-out rows."""
    run.evaluator()
    return run.evaluator.measured[run.data.parts.watched]


def outputs_of_stored(path, run):
    """Return the outputs of the models in a run folder on the held-out rows of a run."""
    head, stored = rebuild(open_model(path, "server")), open_model(path, "server")
    tested = run.data.parts.slices[run.data.parts.watched]
    features = {party.name: party.features[tested] for party in run.data.parties}
    with torch.no_grad():
        parts = [rebuild(open_model(path, name))(features[name]) for name in stored.manifest.parties]
        summed = stored.settings.combine == "sum"
        return head(torch.stack(parts).sum(0) if summed else torch.cat(parts, 1))


def assert_kept(run, path, *parties):
    """Assert that a run starts with the earlier models and encoders of these parties, and of no other."""
    for model, party in zip(run.models, run.data.parties, strict=True):
        if party.name not in parties:
            continue
        stored = open_model(path, party.name)
        assert party.encoder == encoder_of(stored)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, stored.tensors[name]), (party.name, name)


def assert_new(run, *parties, near_zero=False):
    """Assert that a run starts with new models of these parties."""
    fresh = build(run.config)
    for model, other, party in zip(run.models, fresh.models, run.data.parties, strict=True):
        if party.name not in parties:
            continue
        if near_zero:
            start_near_zero(other)
            assert model(party.features).abs().max() < 0.1
        pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize(
    ("head", "combine"), [*((head, "concat") for head in CONCATENATING), ("mlp", "sum"), ("bias", "sum")]
)
def test_the_same_parties_begin_where_they_ended(kinds, earlier, head, combine):
    width = {"width": 0} if head == "bias" else {}
    if head == "bias":
        folder = kinds[0]
        config = configured(kinds, *KINDS, model={"head": head, "combine": combine, **width})
        path = folder / "bias"
        train(config, path)
    else:
        path = earlier(head, *KINDS, combine=combine)
        config = configured(kinds, *KINDS, model={"head": head, "combine": combine})
    before = torch.get_rng_state()
    run = begun(config, path)
    assert torch.equal(torch.get_rng_state(), before)
    assert_kept(run, path, *KINDS)
    assert torch.allclose(outputs(run), outputs_of_stored(path, run), atol=1e-5)
    assert not torch.allclose(outputs(run), outputs(build(config)), atol=0.1)


@pytest.mark.parametrize("head", CONCATENATING)
@pytest.mark.parametrize("first", ["old parties first", "new parties first"])
def test_new_parties_change_nothing_until_the_head_uses_them(kinds, earlier, head, first):
    path, joining = earlier(head, *FIRST), KINDS[3:]
    parties = (*FIRST, *joining) if first == "old parties first" else (*joining, *FIRST)
    run = begun(configured(kinds, *parties, model={"head": head}), path)
    assert_kept(run, path, *FIRST)
    assert_new(run, *joining)
    assert torch.allclose(outputs(run), outputs_of_stored(path, run), atol=1e-5)
    before = [outputs_without(run, party) for party in range(5)]
    run.train()
    for party, (earlier_part, name) in enumerate(zip(before, parties, strict=True)):
        assert not torch.allclose(earlier_part, outputs(run)), name
        assert not torch.allclose(outputs_without(run, party), outputs(run), atol=1e-3), name


def outputs_without(run, party):
    """Return the outputs on the held-out rows with zeros as the embeddings of one party."""
    rows = run.data.parts.slices[run.data.parts.watched]
    count = rows.stop - rows.start  # the watched rows come first
    parts = [embeddings[:count] for embeddings in run.evaluator.embeddings()]
    parts[party] = torch.zeros_like(parts[party])
    with torch.no_grad():
        return run.head.eval()(torch.cat(parts, 1))


@pytest.mark.parametrize("head", ["mlp", "tabular"])
@pytest.mark.parametrize("as_process", [False, True])
def test_new_parties_add_almost_nothing_to_a_sum(kinds, earlier, head, as_process):
    path, model = earlier(head, *FIRST, combine="sum"), {"head": head, "combine": "sum"}
    config = configured(kinds, *KINDS, model=model)
    if as_process:  # of the new party, which has no folder of an earlier run
        beginning = beginning_of(config, path.parent / "new", None, party="arrays", joins=True)
        plan = make_plan(config, party="arrays", beginning=beginning)
        assert plan.from_earlier_run == JOINS
        own = plan.data.parties[3].features
        assert plan.models[3](own).abs().max() < 0.1 * make_plan(config, party="arrays").models[3](own).max()
        return
    run = begun(config, path)
    assert_kept(run, path, *FIRST)
    assert_new(run, *KINDS[3:], near_zero=True)
    assert torch.allclose(outputs(run), outputs_of_stored(path, run), atol=0.02)
    assert not torch.allclose(outputs(run), outputs(build(config)), atol=0.2)
    before = parameters(run)
    run.train()
    changed = [not torch.equal(one, two) for one, two in zip(before, parameters(run), strict=True)]
    assert np.mean(changed) > 0.9, "no new party is dead"


@pytest.mark.parametrize("hidden", [(4,), (), (4, 3)])
@pytest.mark.parametrize("head", CONCATENATING)
def test_a_head_is_copied_by_party(head, hidden):
    """One party leaves, one changes its width, one joins, and the order changes."""
    torch.manual_seed(0)
    settings = ModelSettings(head=head, combine="concat", head_hidden=hidden)
    was = {"bank": slice(0, 2), "shop": slice(2, 5), "clinic": slice(5, 6), "lab": slice(6, 8)}
    now = {"new": slice(0, 3), "lab": slice(3, 5), "shop": slice(5, 9), "bank": slice(9, 11)}
    before, after = make_head(settings, [2, 3, 1, 2], 2).eval(), make_head(settings, [3, 2, 4, 2], 2).eval()
    for parameter in before.parameters():
        torch.nn.init.normal_(parameter)
    if head in ("tabular", "gated"):
        before.measure(torch.tensor([90.0, 100.0, 110.0]))
    copy_head(before, after, was, now)
    if head == "gated":  # a party that is not there adds no bias
        for party in (1, 2):
            torch.nn.init.zeros_(before.parties[party].bias)
    kept = {name: torch.randn(5, 2) for name in ("bank", "lab")}
    old, new = torch.zeros(5, 8), torch.randn(5, 11)  # the embeddings of new parties do not count
    for name, embeddings in kept.items():
        old[:, was[name]], new[:, now[name]] = embeddings, embeddings
    assert torch.allclose(after(new), before(old), atol=1e-5)
    assert not torch.allclose(after(new), after(torch.zeros(5, 11)), atol=1e-2)


@pytest.mark.parametrize("head", CONCATENATING)
def test_a_party_that_leaves_counts_as_zeros(kinds, earlier, head):
    path = earlier(head, *FIRST)
    run = begun(configured(kinds, *FIRST[:2], model={"head": head}), path)
    assert_kept(run, path, *FIRST[:2])
    whole = begun(configured(kinds, *FIRST, model={"head": head}), path)
    expected = outputs_without(whole, 2)
    if head == "gated":  # a gated party that is not there adds nothing; zeros add its bias
        with torch.no_grad():
            whole.head.parties[2].bias.zero_()
        expected = outputs_without(whole, 2)
    assert torch.allclose(outputs(run), expected, atol=1e-5)


def test_new_records_are_encoded_as_before(earlier, tmp_path):
    path = earlier("tabular", *FIRST)
    later = write_kinds(tmp_path, people=90, seed=1)
    config = kinds_configuration(tmp_path, *FIRST, sources=later)
    run = begun(config, path)
    assert run.data.parts.total == 90
    assert_kept(run, path, *FIRST)
    assert [party.encoder for party in build(config).data.parties] != [p.encoder for p in run.data.parties]
    assert torch.allclose(outputs(run), outputs_of_stored(path, run), atol=1e-5)


@pytest.mark.parametrize("head", CONCATENATING)
def test_a_party_with_another_width_starts_anew(kinds, earlier, head, caplog):
    path = earlier(head, *FIRST)
    width = {"table": 4, "series": 6, "images": 4}
    run = begun(configured(kinds, *FIRST, model={"head": head, "width": width}), path)
    assert widths(run) == [4, 6, 4]
    assert_kept(run, path, "table", "images")
    assert_new(run, "series")
    assert "series starts with a new model" in caplog.text
    changed = outputs(run)
    with torch.no_grad():
        run.models[1].inner.second.weight_hh_l0.normal_()
    assert torch.equal(outputs(run), changed)  # the head does not use the new embeddings yet


def test_a_changed_default_width_is_noticed(kinds, earlier):
    """The default depends on the head: 32 for a tabular head, 16 for an mlp."""
    folder, _ = kinds
    path = folder / "default-width"
    train(configured(kinds, *FIRST, model={"head": "tabular", "width": 0}), path)
    run = begun(configured(kinds, *FIRST, model={"head": "mlp", "width": 0}), path)
    assert widths(run) == [16] * 3
    assert_new(run, *FIRST)


def test_another_head_starts_anew_and_the_clients_continue(kinds, earlier, caplog):
    path = earlier("tabular", *FIRST)
    config = configured(kinds, *FIRST, model={"head": "mlp"})
    run = begun(config, path)
    assert_kept(run, path, *FIRST)
    assert "the server starts with a new head" in caplog.text
    fresh = build(config).head.state_dict()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in run.head.state_dict().items())


def test_a_sum_of_another_width_starts_anew(kinds, earlier, caplog):
    path = earlier("mlp", *FIRST, combine="sum")
    run = begun(configured(kinds, *FIRST, model={"head": "mlp", "combine": "sum", "width": 5}), path)
    assert_new(run, *FIRST)
    assert "the embeddings were 4 wide and are 5" in caplog.text


@pytest.mark.parametrize(
    ("party", "change"),
    [
        ("series", {"embedding": {"model": "transformer"}}),
        ("table", {"embedding": {"model": "tabular", "hidden": [9]}}),
        ("series", {"source": {"ignore": ["b"]}}),
        ("series", {"source": {"steps": 2}}),
        ("images", {"source": {"size": [8, 8]}}),
        ("images", {"source": {"channels": 3}}),
        ("table", {"source": {"ignore": ["word"]}}),
    ],
    ids=str,
)
def test_a_changed_party_starts_anew(kinds, earlier, party, change, caplog):
    path = earlier("tabular", *FIRST)
    folder, sources = kinds
    sources = {name: dict(source) for name, source in sources.items()}
    sources[party] |= change.get("source", {})
    whole = kinds_document(folder, *FIRST, sources=sources)
    whole["parties"][party] |= {"embedding": change.get("embedding", whole["parties"][party]["embedding"])}
    run = begun(from_document(whole), path)
    assert f"{party} starts with a new model" in caplog.text
    assert_kept(run, path, *(name for name in FIRST if name != party))
    assert_new(run, party, near_zero=True)  # the head keeps its columns
    assert torch.allclose(outputs(run), outputs_without(run, FIRST.index(party)), atol=0.05)


def test_another_kind_of_source_starts_anew(kinds, earlier, caplog):
    path = earlier("linear", *KINDS)
    folder, sources = kinds
    sources = {name: dict(source) for name, source in sources.items()}
    sources["python"] = {**sources["arrays"]}
    whole = kinds_document(folder, *KINDS, sources=sources, model={"head": "linear"})
    run = begun(from_document(whole), path)
    assert "python starts with a new model" in caplog.text
    assert_new(run, "python", near_zero=True)
    assert_kept(run, path, *KINDS[:4])


def test_records_of_another_shape_start_anew(kinds, earlier, tmp_path):
    path = earlier("linear", *KINDS)
    folder, sources = kinds
    shutil.copytree(folder, tmp_path / "data")
    values = np.load(tmp_path / "data" / "array.npy")
    np.save(tmp_path / "data" / "array.npy", np.concatenate([values, values], 1))
    sources = {name: dict(source) for name, source in sources.items()}
    sources["arrays"]["path"] = str(tmp_path / "data" / "array.npy")
    run = begun(from_document(kinds_document(folder, sources=sources, model={"head": "linear"})), path)
    assert_new(run, "arrays", near_zero=True)
    assert_kept(run, path, "table", "series", "images", "python")


def test_another_rule_for_records_starts_every_client_anew(kinds, earlier):
    path = earlier("linear", *FIRST)
    run = begun(configured(kinds, *FIRST, data={"records": "common"}, model={"head": "linear"}), path)
    assert_new(run, *FIRST, near_zero=True)


def test_other_classes_are_refused(kinds, earlier, tmp_path):
    path = earlier("linear", *FIRST)
    folder, sources = kinds
    labels = pl.read_csv(folder / "labels.csv")
    labels.with_columns(label=labels["label"].replace({"yes": "maybe"})).write_csv(tmp_path / "labels.csv")
    sources = {name: dict(source) for name, source in sources.items()}
    sources["server"]["path"] = str(tmp_path / "labels.csv")
    config = from_document(kinds_document(folder, *FIRST, sources=sources, model={"head": "linear"}))
    with pytest.raises(RunFolderError, match=r'VFL-3041.*classes.*"yes".*"maybe"'):
        begun(config, path)


@pytest.mark.parametrize("head", CONCATENATING)
def test_each_process_takes_its_own_model(kinds, earlier, head):
    path = earlier(head, *FIRST)
    config = configured(kinds, *FIRST, model={"head": head})
    for index, name in enumerate(FIRST):
        plan = make_plan(config, party=name, beginning=EarlierRun(path, config, name))
        assert plan.from_earlier_run == open_model(path, "server").manifest.run
        stored = open_model(path, name).tensors
        assert all(torch.equal(stored[key], value) for key, value in plan.models[index].state_dict().items())
    plan = make_plan(config, party="server", beginning=EarlierRun(path, config))
    stored = open_model(path, "server").tensors
    assert all(torch.equal(stored[key], value) for key, value in plan.head.state_dict().items())


def test_the_server_keeps_the_columns_of_clients_that_its_file_does_not_describe(kinds, earlier):
    """The run folder may hold their models all the same, if several parties have used it."""
    path, (folder, sources) = earlier("linear", *FIRST), kinds
    sources = {name: dict(source) for name, source in sources.items()}
    whole = kinds_document(folder, *FIRST, sources=sources, model={"head": "linear"})
    whole |= {"party": "server", "parties": {"server": whole["parties"]["server"]}}
    config = from_document(whole)
    _write_alignments(folder, kinds)
    try:
        plan = make_plan(config, party="server", beginning=EarlierRun(path, config))
    finally:
        for name in ("server", *FIRST):
            (folder / f"{name}.alignment.parquet").unlink()
    assert torch.equal(plan.head.weight, open_model(path, "server").tensors["weight"])


def _write_alignments(folder, kinds):
    from vafl.data.aligned import join

    config = configured(kinds, *FIRST)
    for name, alignment in join(config.data, config.sources).items():
        alignment.write(folder / f"{name}.alignment.parquet")


@pytest.mark.parametrize("head", ["tabular", "gated"])
def test_the_label_holder_joins_and_continues_with_its_own_columns(tmp_path, head):
    write_companies(tmp_path)
    model = {"head": head, "combine": "concat", "width": {"bank": 3, "shop": 5}}
    sections = {"embedding": {"model": "auto"}, "data": {"records": "labelled"}, "stop": {"updates": 40}}
    train(configuration(tmp_path, model=model, **sections), tmp_path / "alone")
    add_own_columns(tmp_path)
    model["width"]["server"] = 2
    config = configuration(tmp_path, model=model, **sections)
    run = begun(config, tmp_path / "alone")
    assert [party.name for party in run.data.parties] == ["bank", "shop", LOCAL_CLIENT]
    assert widths(run) == [3, 5, 2]
    assert_kept(run, tmp_path / "alone", "bank", "shop")
    assert torch.equal(outputs(run), outputs_without(run, 2))
    train(config, tmp_path / "joined", tmp_path / "alone")
    again = begun(config, tmp_path / "joined")
    assert_kept(again, tmp_path / "joined", "bank", "shop", LOCAL_CLIENT)
    assert torch.allclose(outputs(again), outputs_of_stored(tmp_path / "joined", again), atol=1e-5)
    model["width"]["server"] = 4
    wider = begun(configuration(tmp_path, model=model, **sections), tmp_path / "joined")
    assert_new(wider, LOCAL_CLIENT)


def test_public_data_continue_only_with_records_of_the_same_shape(tmp_path):
    digits = {
        "partition": {"clients": 2},
        "model": {"head": "linear", "combine": "concat", "width": 4},
        "stop": {"updates": 20},
    }
    config = from_document(digits)
    train(config, tmp_path / "two")
    run = begun(config, tmp_path / "two")
    assert_kept(run, tmp_path / "two", "client-1", "client-2")
    four = from_document({**digits, "partition": {"clients": 4}})
    run = begun(four, tmp_path / "two")
    assert_new(run, "client-1", "client-2", near_zero=True)
    assert_new(run, "client-3", "client-4")
    assert not run.head.weight[:, 8:].any()


PRIVATE = {"mode": "dp_train", "clip": 1.0, "noise": 0.1, "gradient_clip": 1.0, "gradient_noise": 0.1}


@pytest.mark.parametrize(
    ("before", "after", "allowed"),
    [
        ("none", "dp_train", False),
        ("none", "embed_only", False),
        ("embed_only", "frozen", False),
        ("embed_only", "embed_only", True),
        ("dp_train", "dp_train", True),
        ("dp_train", "release_once", True),
        ("dp_train", "none", True),
    ],
)
def test_noise_needs_earlier_models_with_as_much_noise(tmp_path, before, after, allowed):
    """Parameters that were trained without noise would carry their records past the noise of the new run."""
    write_companies(tmp_path, people=100)

    def private(mode):
        settings = {"none": {}, "dp_train": PRIVATE}.get(mode, {"mode": mode, "clip": 1.0, "noise": 0.1})
        budget = {} if mode in ("none", "embed_only") else {"mu_max": "unlimited"}
        sections = {"data": {"scale": "none"}, "stop": {"updates": 20}}
        own = {"bank": {"ignore": ["job"]}, "shop": {"ignore": ["city"]}}
        whole = document(tmp_path, privacy={**settings, **budget}, **sections)
        for name, change in own.items():
            whole["parties"][name]["source"] |= change
        return from_document(whole)

    train(private(before), tmp_path / "run")
    if allowed:
        assert_kept(begun(private(after), tmp_path / "run"), tmp_path / "run", "bank", "shop")
    else:
        with pytest.raises(RunFolderError, match=f'VFL-7224.*"{after}".*"{before}"'):
            begun(private(after), tmp_path / "run")


def test_protected_labels_need_a_head_that_has_not_learnt_true_ones(tmp_path):
    write_companies(tmp_path)
    config = configuration(tmp_path, stop={"updates": 20})
    protected = configuration(tmp_path, stop={"updates": 20}, labels={"epsilon": 2.0})
    train(config, tmp_path / "true")
    train(protected, tmp_path / "drawn")
    with pytest.raises(RunFolderError, match="VFL-7225"):
        begun(protected, tmp_path / "true")
    assert_kept(begun(protected, tmp_path / "drawn"), tmp_path / "drawn", "bank", "shop")
    begun(config, tmp_path / "drawn")


def test_a_folder_without_models_is_refused(kinds, tmp_path):
    with pytest.raises(RunFolderError, match="VFL-7221"):
        EarlierRun(tmp_path, configured(kinds, *FIRST))


def test_the_server_needs_the_head(kinds, earlier, tmp_path):
    shutil.copytree(earlier("linear", *FIRST), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "models" / "server")
    with pytest.raises(RunFolderError, match="VFL-7228"):
        begun(configured(kinds, *FIRST, model={"head": "linear"}), tmp_path / "run")


def test_a_model_in_another_party_s_folder_is_refused(kinds, earlier, tmp_path):
    shutil.copytree(earlier("linear", *FIRST), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "models" / "table")
    shutil.copytree(tmp_path / "run" / "models" / "series", tmp_path / "run" / "models" / "table")
    with pytest.raises(RunFolderError, match=r"VFL-3041.*party"):
        begun(configured(kinds, *FIRST, model={"head": "linear"}), tmp_path / "run")


def test_a_run_starts_from_another_or_resumes_itself(kinds, earlier, tmp_path):
    path, config = earlier("linear", *FIRST), configured(kinds, *FIRST)
    for earlier_run, options in (
        (path, {"resume": True}),
        (path, {"joins": True}),
        (None, {"resume": True, "joins": True}),
    ):
        with pytest.raises(ConfigError, match="VFL-7223"):
            beginning_of(config, tmp_path, earlier_run, **options)
    with pytest.raises(ConfigError, match="VFL-7226"):
        beginning_of(config, path, path)
    with pytest.raises(ConfigError, match="VFL-7226"):
        launch(config, path, **QUIET, earlier=path, overwrite=True)
    assert beginning_of(config, tmp_path, None) is None


def test_a_resumed_run_uses_the_encoder_that_it_started_with(kinds, earlier, tmp_path):
    stored = encoder_of(open_model(earlier("linear", *FIRST), "table"))
    keep_encoder(tmp_path / "table", stored)
    save_checkpoint(tmp_path / "table", {}, {"terms": {"from_earlier_run": "0a1b"}})
    resumed = ResumedRun(tmp_path, "table")
    assert resumed.from_earlier_run == "0a1b"
    assert resumed.encoder("table") == stored
    assert resumed.encoder("series") is None
    keep_encoder(tmp_path / "table", None)
    assert resumed.encoder("table") is None
    keep_encoder(tmp_path / "nowhere", None)
    path = tmp_path / "table" / "encoder.json"
    for damaged in ("{", "[]", json.dumps({"kind": "table"})):
        path.write_text(damaged)
        with pytest.raises(RunFolderError, match="VFL-7222"):
            resumed.encoder("table")


def test_a_party_that_lost_its_earlier_model_cannot_resume(kinds, earlier, tmp_path):
    require_new_models(tmp_path)
    keep_encoder(tmp_path, encoder_of(open_model(earlier("linear", *FIRST), "table")))
    with pytest.raises(RunFolderError, match="VFL-7227"):
        require_new_models(tmp_path)


@pytest.mark.parametrize(
    "model",
    [
        {"head": "tabular", "combine": "concat"},
        {"head": "gated", "combine": "concat"},
        {"head": "linear", "combine": "concat"},
        {"head": "mlp", "combine": "sum"},
        {"head": "bias"},
    ],
    ids=lambda model: model["head"],
)
def test_a_new_party_helps_after_a_tenth_of_the_updates(tmp_path, model):
    everyone = _four_signals()
    three = replace(everyone, parties=everyone.parties[:3])
    document = {
        "model": model,
        "embedding": {"model": "linear" if model["head"] == "bias" else "mlp"},
        "schedule": {"batch_size": 50},
        "optimiser": {"name": "Adam", "step_size": 0.005},
        "stop": {"updates": 600},
        "evaluation": {"every": 600},
    }
    config = from_document(document)
    run = build(config, three)
    before = run.train()[-1].metrics
    keep_all(run, Decision(), tmp_path)
    joined = from_document({**document, "stop": {"updates": 60}, "evaluation": {"every": 60}})
    start, end = build(joined, everyone, EarlierRun(tmp_path, joined)).train()
    assert start.metrics["log_loss"] == pytest.approx(before["log_loss"], rel=0.01)
    assert end.metrics["log_loss"] < before["log_loss"]
    assert end.metrics["auc"] > before["auc"]


def _four_signals(rows=2000):
    """Return four parties whose features add up to the log-odds of the label."""
    generator = torch.Generator().manual_seed(0)
    features = [torch.randn(rows, 5, generator=generator) for _ in range(4)]
    scores = sum(part.sum(1) for part in features)
    labels = (torch.rand(rows, generator=generator) < torch.sigmoid(scores)).long()
    parties = tuple(Party(f"client-{number}", part) for number, part in enumerate(features, 1))
    return VerticalData(parties, labels, Parts(rows // 2, test=rows // 2), ("no", "yes"))


def test_a_continued_run_is_written_and_may_be_replaced(kinds, earlier, tmp_path):
    path = earlier("linear", *FIRST)
    config = configured(kinds, *FIRST, model={"head": "linear"}, stop={"updates": 20})
    recorded = launch(config, tmp_path / "run", **QUIET, earlier=path)
    assert recorded.summary["updates"] == 20
    assert encoder_of(open_model(tmp_path / "run", "table")) == encoder_of(open_model(path, "table"))
    keep_encoder(tmp_path / "run" / "state" / "table", encoder_of(open_model(path, "table")))
    with RunFolder(tmp_path / "run", overwrite=True):
        pass
    assert not (tmp_path / "run" / "state").exists()
