"""`vafl check`: what a party has and lacks, before any network."""

import json
import shutil

import numpy as np
import polars as pl
import pytest
import tomli_w
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from tests.companies import add_own_columns, document, write_companies
from tests.kinds import KINDS, kinds_document
from vafl.cli import main
from vafl.config import read_config
from vafl.config.agreement import agreed_digest
from vafl.data.aligned import join
from vafl.transport.identity import issue, make_authority

ITEMS = ["source", "labels", "embedding", "alignment", "certificates", "privacy"]
PARTY_SECTIONS = ("source", "embedding", "optimiser", "local_steps", "privacy")
WRONG = 2  # the exit code


@pytest.fixture
def check(capsys):
    """Return a function that runs `vafl check --json`; it returns the exit code and the document."""

    def run(path, *options):
        capsys.readouterr()
        code = main(["check", str(path), "--json", *options])
        out, error = capsys.readouterr()
        return code, json.loads(out) if out else error

    return run


def write(path, whole):
    path.write_text(tomli_w.dumps(whole))
    return path


def write_two_files(folder, whole, **sections):
    """Write federation.toml, and a folder with party.toml for each party; return party -> its file.

    Args:
        sections: what every party's own file has besides its section in the file of all parties.
    """
    shared = {key: value for key, value in whole.items() if key not in ("parties", "optimiser", "embedding")}
    write(folder / "federation.toml", shared)
    files = {}
    for party, own in whole["parties"].items():
        (folder / party).mkdir(exist_ok=True)
        given = {"party": party, "federation": "../federation.toml", **own, **sections}
        files[party] = write(folder / party / "party.toml", given)
    return files


def states(document, party):
    return {found["item"]: found["state"] for found in document["findings"] if found["party"] == party}


def text(document, item, party=None):
    (found,) = [
        found for found in document["findings"] if found["item"] == item and party in (None, found["party"])
    ]
    return found["text"]


TODO = {**dict.fromkeys(ITEMS, "ok"), "alignment": "to do", "certificates": "to do"}


def test_one_file_of_all_parties(tmp_path, check):
    path = write(tmp_path / "run.toml", kinds_document(tmp_path))
    code, found = check(path)
    assert code == 0
    for party in ("server", *KINDS):
        assert states(found, party) == TODO
    assert found["others"] == []
    assert found["digest"] == agreed_digest(read_config(path))
    assert found["next"] == f"vafl run {path}"
    assert "2 classes: no, yes" in text(found, "labels", "server")
    assert "1 x 4 x 6 -> 4" in text(found, "embedding", "images")


def test_two_files_have_the_digest_of_one_and_say_what_the_others_need(tmp_path, check):
    whole = kinds_document(tmp_path, model={"width": {"series": 8}})
    path = write(tmp_path / "run.toml", whole)
    digest = check(path)[1]["digest"]
    for party, own in write_two_files(tmp_path, whole).items():
        code, found = check(own)
        assert (code, found["digest"]) == (0, digest)
        assert {finding["party"] for finding in found["findings"]} == {party}
        assert states(found, party) == TODO
        needed = {other["party"]: "; ".join(other["must_have"]) for other in found["others"]}
        assert set(needed) == {"server", *KINDS} - {party}
        if party != "server":
            assert "the labels" in needed["server"]
        if party != "series":
            assert "width 8" in needed["series"]
        if party != "table":
            assert "width 32" in needed["table"]  # the default of a tabular head
        assert "certificate" in found["next"]


@pytest.mark.parametrize(
    "setting", ["model.width=5", "network.encoding=int8", "network.run_id=other", "rule.t=3", "seed=4"]
)
def test_whatever_the_parties_compare_changes_the_digest(tmp_path, check, setting):
    files = write_two_files(tmp_path, kinds_document(tmp_path, "table"))
    before, after = (check(files["table"], *options)[1]["digest"] for options in ([], ["--set", setting]))
    assert before != after


def test_what_a_party_chooses_alone_does_not_change_the_digest(tmp_path, check):
    files = write_two_files(tmp_path, kinds_document(tmp_path, "table"))
    digest = check(files["server"])[1]["digest"]
    for setting in ("optimiser.step_size=0.5", "network.address=x:1", "embedding.hidden=[3]", "threads=2"):
        assert check(files["table"], "--set", setting)[1]["digest"] == digest


def test_aligned_parties_with_certificates_are_ready(tmp_path, check):
    whole = kinds_document(tmp_path, "table", network={"certificates": "certs"})
    path = write(tmp_path / "run.toml", whole)
    config = read_config(path)
    for party, alignment in join(config.data, config.sources).items():
        alignment.write(tmp_path / f"{party}.alignment.parquet")
    make_authority(tmp_path / "certs")
    for party in ("server", "table"):
        issue(tmp_path / "certs", party)
    code, found = check(path)
    assert code == 0
    assert states(found, "table") == states(found, "server") == dict.fromkeys(ITEMS, "ok")
    assert "108 of 120 rows" in text(found, "alignment", "table")
    own = {"certificates": str(tmp_path / "certs" / "table")}
    del whole["network"]
    files = write_two_files(tmp_path, whole, network=own)
    assert check(files["table"])[1]["next"] == f"vafl client {files['table']}"
    (tmp_path / "certs" / "table" / "table.key").unlink()
    code, found = check(files["table"])
    assert (code, states(found, "table")["certificates"]) == (WRONG, "wrong")


def test_the_text_names_the_items_and_the_next_command(tmp_path, capsys):
    whole = kinds_document(tmp_path, "table")
    files = write_two_files(tmp_path, whole, network={"security": "plaintext"})
    assert main(["check", str(files["table"])]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for expected in (*ITEMS, "to do", "digest", "server must have", "vafl align"):
        assert expected in shown


def spoil_ids(folder, whole):
    frame = pl.read_csv(folder / "table.csv")
    pl.concat([frame, frame.head(1)]).write_csv(folder / "table.csv")


def spoil_labels(folder, whole):
    frame = pl.read_csv(folder / "labels.csv")
    frame.with_columns(label=pl.lit("yes")).write_csv(folder / "labels.csv")


def lose_a_label(folder, whole):
    frame = pl.read_csv(folder / "labels.csv")
    frame.with_columns(label=pl.when(pl.arange(len(frame)) > 0).then("label")).write_csv(
        folder / "labels.csv"
    )


def give_weights(tensors):
    def spoil(folder, whole):
        save_file(tensors, folder / "weights.safetensors")
        own = whole["parties"]["arrays"]["embedding"]
        whole["parties"]["arrays"]["embedding"] = {**own, "weights": str(folder / "weights.safetensors")}

    return spoil


def give_text_as_weights(folder, whole):
    give_weights({"0.bias": torch.zeros(8)})(folder, whole)
    (folder / "weights.safetensors").write_text("no tensors")


def embed(**settings):
    def spoil(folder, whole):
        own = whole["parties"]["arrays"]["embedding"]
        whole["parties"]["arrays"]["embedding"] = {**own, **settings}

    return spoil


def set_model(**settings):
    return lambda folder, whole: whole["model"].update(settings)


def lose_the_source(folder, whole):
    del whole["parties"]["arrays"]["source"]


def lose_the_file(folder, whole):
    (folder / "array.npy").unlink()


def lose_the_label_column(folder, whole):
    whole["parties"]["server"]["source"].pop("label")


def add_text_to_the_array(folder, whole):
    np.save(folder / "array.npy", np.array([["a"]] * 108))


def spoil_an_image(folder, whole):
    first = min((folder / "images").iterdir())
    first.write_bytes(b"no image")


def ask_for_scaling_and_privacy(folder, whole):
    whole["data"]["scale"] = "standard"
    whole["privacy"] = {"mode": "frozen", "clip": 1.0, "noise": 1.0, "mu_max": "unlimited"}


def mix_records_under_privacy(folder, whole):
    ask_for_scaling_and_privacy(folder, whole)
    whole["data"]["scale"] = "none"
    embed(model=f"{__name__}:mixing")(folder, whole)


def mixing(shape, width):
    """Return a network that mixes the records of a batch."""
    return nn.Sequential(nn.BatchNorm1d(shape[0]), nn.Linear(shape[0], width))


def align_and_lose_records(folder, whole):
    path = write(folder / "aligned.toml", whole)
    config = read_config(path)
    for party, alignment in join(config.data, config.sources).items():
        alignment.write(folder / f"{party}.alignment.parquet")
    pl.read_csv(folder / "table.csv").head(90).write_csv(folder / "table.csv")


@pytest.mark.parametrize(
    ("spoil", "party", "item", "code"),
    [
        (lose_the_source, "arrays", "source", "source"),
        (lose_the_file, "arrays", "source", "VFL-2351"),
        (add_text_to_the_array, "arrays", "source", "VFL-2352"),
        (spoil_ids, "table", "source", "VFL-2"),
        (lose_the_label_column, "server", "labels", "label"),
        (spoil_labels, "server", "labels", "VFL-2211"),
        (lose_a_label, "server", "labels", "VFL-2213"),
        (spoil_an_image, "images", "embedding", "VFL-2382"),
        (embed(model="cnn"), "arrays", "embedding", "VFL-3011"),
        (embed(model="no_such_module:network"), "arrays", "embedding", "VFL-3013"),
        (embed(model="auto", device="cuda:7"), "arrays", "embedding", "VFL-3027"),
        (embed(weights="nowhere.safetensors"), "arrays", "embedding", "VFL-3023"),
        (give_text_as_weights, "arrays", "embedding", "VFL-3023"),
        (give_weights({"9.bias": torch.zeros(8)}), "arrays", "embedding", "VFL-3024"),
        (give_weights({"0.bias": torch.zeros(9)}), "arrays", "embedding", "VFL-3025"),
        (give_weights({}), "arrays", "embedding", "VFL-3026"),
        (set_model(width={"nobody": 3}), "arrays", "embedding", "VFL-3018"),
        (set_model(width={"table": 3}, combine="sum"), "arrays", "embedding", "VFL-3019"),
        (align_and_lose_records, "table", "alignment", "VFL-9163"),
        (ask_for_scaling_and_privacy, "arrays", "privacy", "VFL-7155"),
        (mix_records_under_privacy, "arrays", "embedding", "VFL-5072"),
    ],
    ids=lambda value: getattr(value, "__qualname__", value),
)
def test_what_is_wrong_is_named(tmp_path, check, spoil, party, item, code):
    whole = kinds_document(tmp_path)
    spoil(tmp_path, whole)
    exit_code, found = check(write(tmp_path / "run.toml", whole))
    assert exit_code == WRONG
    assert states(found, party)[item] == "wrong"
    assert code in text(found, item, party)
    assert found["next"] == ""
    for other in ("server", *KINDS):
        if other != party and spoil not in (ask_for_scaling_and_privacy, mix_records_under_privacy):
            wrong = [item for item, state in states(found, other).items() if state == "wrong"]
            assert not wrong or code in ("VFL-3018", "VFL-3019"), other  # widths concern all parties


def test_a_budget_is_shown_and_needed_everywhere(tmp_path, check):
    write_companies(tmp_path)
    private = {"mode": "frozen", "clip": 1.0, "noise": 1.0, "mu_max": "unlimited"}
    whole = document(tmp_path, data={"scale": "none"}, privacy=private, network={"security": "plaintext"})
    whole["parties"]["bank"]["source"]["ignore"] = ["job"]
    whole["parties"]["shop"]["source"]["ignore"] = ["city"]
    code, found = check(write(tmp_path / "run.toml", whole))
    assert (code, text(found, "privacy", "bank")) == (0, "frozen, budget mu unlimited")
    whole["parties"]["bank"]["privacy"] = {"mu_max": 3.0}
    assert text(check(write(tmp_path / "run.toml", whole))[1], "privacy", "bank") == "frozen, budget mu 3.0"
    del whole["network"], whole["privacy"]["mu_max"]
    whole["parties"]["shop"]["privacy"] = {"mu_max": 4.0}
    needs = check(write_two_files(tmp_path, whole)["shop"])[1]["others"]
    assert any("privacy.mu_max" in text for other in needs for text in other["must_have"])


def test_the_label_holder_s_own_columns_are_embedded_too(tmp_path, check):
    write_companies(tmp_path)
    add_own_columns(tmp_path)
    model = {"head": "linear", "combine": "concat", "width": {"server": 3}}
    code, found = check(write(tmp_path / "run.toml", document(tmp_path, model=model)))
    assert code == 0
    assert "-> 3" in text(found, "embedding", "server")
    shutil.rmtree(tmp_path / "parties", ignore_errors=True)
    files = write_two_files(tmp_path, document(tmp_path, model=model))
    assert check(files["bank"])[0] == 0


def test_a_bias_head_has_the_width_of_the_outputs(tmp_path, check):
    whole = kinds_document(tmp_path, model={"head": "bias", "combine": "sum", "width": 0})
    found = check(write(tmp_path / "run.toml", whole))[1]
    assert "-> the outputs" in text(found, "embedding", "arrays")
    needs = check(write_two_files(tmp_path, whole)["arrays"])[1]["others"]
    assert any("the width of the outputs" in needed for needed in needs[1]["must_have"])


def test_frozen_and_pretrained_parameters_are_counted(tmp_path, check):
    whole = kinds_document(tmp_path, "images")
    whole["parties"]["images"]["embedding"] = {"model": "cnn", "hidden": [4], "train": "last"}
    found = text(check(write(tmp_path / "run.toml", whole))[1], "embedding", "images")
    assert "192 parameters, 152 trained" in found  # 4 * (9 + 1), 4 * (4 * 9 + 1), and 4 for absent records
    Image.new("L", (9, 9)).save(tmp_path / "images" / "P999.png")


def test_only_data_of_parties_can_be_checked(tmp_path, check):
    assert check(write(tmp_path / "digits.toml", {"data": {"name": "digits"}}))[0] == WRONG
    shared = {"data": {"name": "parties", "parties": ["bank"]}}
    code, said = check(write(tmp_path / "federation.toml", shared))
    assert code == WRONG
    assert "VFL-9164" in said
