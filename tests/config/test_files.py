"""federation.toml and party.toml: what each may hold, and what one party's configuration is made of."""

import pytest
import tomli_w

from vafl.config import Config, from_document, read_config
from vafl.config.agreement import agreed_digest, shared_settings, training_settings
from vafl.errors import ConfigError
from vafl.names import SERVER

SHARED = {
    "seed": 3,
    "data": {"name": "parties", "parties": ["bank", "clinic"], "records": "labelled"},
    "model": {"width": {"clinic": 8}},
}
BANK = {"source": {"path": "bank.csv", "id": "person"}}
CLINIC = {
    "local_steps": 3,
    "source": {"kind": "images", "path": "scans"},
    "embedding": {"model": "cnn", "weights": "cnn.safetensors"},
    "optimiser": {"name": "Adam", "step_size": 0.01},
    "network": {"address": "server:1", "certificates": "certs"},
}
HOLDER = {"source": {"path": "labels.csv", "id": "person", "label": "paid"}}


def write(folder, party, own, shared=SHARED):
    """Write both files, the party's in its own folder, and return the party's."""
    (folder / party).mkdir(exist_ok=True)
    (folder / "federation.toml").write_text(tomli_w.dumps(shared))
    path = folder / party / "party.toml"
    path.write_text(tomli_w.dumps({"party": party, "federation": "../federation.toml", **own}))
    return path


def test_a_party_s_configuration_has_both_files(tmp_path):
    config = read_config(write(tmp_path, "clinic", CLINIC))
    assert config.party == "clinic"
    assert config.seed == 3
    assert config.data.parties == ("bank", "clinic")
    assert list(config.sources) == ["clinic"]
    own = config.of("clinic")
    assert (own.embedding.model, own.optimiser.name, own.rule.local_steps) == ("cnn", "Adam", 3)
    assert own.optimiser.schedule == "cosine"  # of the defaults for tables, which all parties have
    assert own.network.address == "server:1"


def test_each_path_starts_at_the_folder_of_its_file(tmp_path):
    shared = {**SHARED, "labels": {"epsilon": 1.0, "file": "drawn"}}
    config = read_config(write(tmp_path, "clinic", CLINIC, shared))
    folder, source = tmp_path / "clinic", config.sources["clinic"]
    assert config.labels.file == str(tmp_path / "drawn")
    assert source.path == str(folder / "scans")
    assert source.alignment == str(folder / "clinic.alignment.parquet")
    assert source.cache == str(folder / "clinic.cache")
    assert config.of("clinic").embedding.weights == str(folder / "cnn.safetensors")
    assert config.network.certificates == str(folder / "certs")


def test_all_parties_agree_whatever_each_of_them_chooses(tmp_path):
    whole = {**SHARED, "parties": {"server": {"source": HOLDER["source"]}, "bank": BANK}}
    one_file = from_document(whole)
    for party, own in (("bank", BANK), ("clinic", CLINIC), ("server", {"source": HOLDER["source"]})):
        config = read_config(write(tmp_path, party, own))
        assert shared_settings(config) == shared_settings(one_file)
        assert training_settings(config) == training_settings(one_file)
        assert agreed_digest(config) == agreed_digest(one_file)


@pytest.mark.parametrize(
    "own", [{"embedding": {"model": "mlp"}}, {"optimiser": {"name": "sgd"}}, {"threads": 2}]
)
def test_a_party_s_choice_does_not_move_the_defaults_of_the_others(tmp_path, own):
    config = read_config(write(tmp_path, "bank", {**BANK, **own}))
    assert agreed_digest(config) == agreed_digest(read_config(write(tmp_path, "bank", BANK)))
    assert config.model.head == "tabular"


def test_the_server_may_set_what_it_alone_decides(tmp_path):
    own = {"source": HOLDER["source"], "evaluation": {"every": 7}, "labels": {"epsilon": 2.0}}
    config = read_config(write(tmp_path, SERVER, {**own, "optimiser": {"server_step_size": 0.5}}))
    assert (config.evaluation.every, config.labels.epsilon) == (7, 2.0)
    assert config.of(SERVER).optimiser.server_step_size == 0.5
    with pytest.raises(ConfigError, match=r"VFL-1026.*evaluation\.every"):
        read_config(write(tmp_path, "bank", {**BANK, "evaluation": {"every": 7}}))


@pytest.mark.parametrize(
    ("party", "own", "shared", "setting"),
    [
        ("bank", {"model": {"width": 3}}, {}, r"model\.width"),
        ("bank", {"seed": 1}, {}, "seed"),
        ("bank", {"optimiser": {"schedule": "constant"}}, {}, r"optimiser\.schedule"),
        ("bank", {"privacy": {"noise": 1.0}}, {}, r"privacy\.noise"),
        ("bank", {"network": {"run_id": "x"}}, {}, r"network\.run_id"),
        ("server", {"stop": {"patience": 5}}, {}, r"stop\.patience"),
        ("bank", {"parties": {"bank": {"local_steps": 2}}}, {}, "parties"),
        ("bank", {}, {"parties": {"bank": {"local_steps": 2}}}, "parties"),
        ("bank", {}, {"embedding": {"model": "mlp"}}, r"embedding\.model"),
        ("bank", {}, {"optimiser": {"step_size": 1.0}}, r"optimiser\.step_size"),
        ("bank", {}, {"privacy": {"mu_max": 1.0}}, r"privacy\.mu_max"),
        ("bank", {}, {"network": {"address": "x:1"}}, r"network\.address"),
        ("bank", {}, {"party": "bank"}, "party"),
    ],
    ids=str,
)
def test_a_setting_in_the_wrong_file_is_refused(tmp_path, party, own, shared, setting):
    path = write(tmp_path, party, {**BANK, **own}, {**SHARED, **shared})
    with pytest.raises(ConfigError, match=rf"VFL-1026.*{setting} "):
        read_config(path)


@pytest.mark.parametrize("change", [{"party": ""}, {"party": 3}, {"federation": ""}, {"federation": []}])
def test_a_party_s_file_names_its_party_and_the_shared_file(tmp_path, change):
    path = write(tmp_path, "bank", BANK)
    path.write_text(tomli_w.dumps({"party": "bank", "federation": "../federation.toml", **BANK, **change}))
    with pytest.raises(ConfigError, match="VFL-1025"):
        read_config(path)


def test_a_party_without_its_name_or_with_another_one_is_refused(tmp_path):
    path = write(tmp_path, "bank", BANK)
    path.write_text(tomli_w.dumps({"federation": "../federation.toml", **BANK}))
    with pytest.raises(ConfigError, match="VFL-1025"):
        read_config(path)
    with pytest.raises(ConfigError, match=r"VFL-1016.*shop"):
        read_config(write(tmp_path, "shop", BANK))


def test_a_shared_file_that_is_not_there_is_named(tmp_path):
    path = write(tmp_path, "bank", BANK)
    (tmp_path / "federation.toml").unlink()
    with pytest.raises(ConfigError, match=r"VFL-1021.*federation\.toml"):
        read_config(path)


def test_unknown_keys_get_a_hint_in_either_file(tmp_path):
    with pytest.raises(ConfigError, match="optimizer"):
        read_config(write(tmp_path, "bank", {**BANK, "optimizer": {"step_size": 1.0}}))
    with pytest.raises(ConfigError, match="widht"):
        read_config(write(tmp_path, "bank", BANK, {**SHARED, "model": {"widht": 3}}))


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("optimiser.step_size=0.5", lambda own: own.optimiser.step_size, 0.5),
        ("embedding.model=mlp", lambda own: own.embedding.model, "mlp"),
        ("local_steps=2", lambda own: own.rule.local_steps, 2),
        ("source.size=[8, 8]", lambda own: own.sources["clinic"].size, (8, 8)),
        ("model.head=gated", lambda own: own.model.head, "gated"),
        ("optimiser.schedule=constant", lambda own: own.optimiser.schedule, "constant"),
        ("network.address=other:2", lambda own: own.network.address, "other:2"),
        ("seed=9", lambda own: own.seed, 9),
    ],
)
def test_an_override_wins_over_both_files(tmp_path, override, read, value):
    assert read(read_config(write(tmp_path, "clinic", CLINIC), [override]).of("clinic")) == value


PRIVATE = {"mode": "frozen", "clip": 1.0, "noise": 1.0}


def test_the_noise_is_shared_and_the_budget_is_each_party_s(tmp_path):
    shared = {**SHARED, "privacy": PRIVATE, "data": {**SHARED["data"], "scale": "none"}}
    bank = read_config(
        write(tmp_path, "bank", {**BANK, "privacy": {"mu_max": 2.0, "ledger": "kept"}}, shared)
    )
    own = bank.of("bank").privacy
    assert (own.kind, own.noise, own.mu_max) == ("frozen", 1.0, 2.0)
    assert own.ledger == str(tmp_path / "bank" / "kept")
    holder = read_config(write(tmp_path, SERVER, {"source": HOLDER["source"]}, shared))
    assert agreed_digest(bank) == agreed_digest(holder)
    assert holder.model.head == bank.model.head == "bias"  # private runs have no defaults for tables
    with pytest.raises(ConfigError, match="VFL-5105"):
        read_config(write(tmp_path, "bank", BANK, shared))


def test_in_one_file_every_client_needs_a_budget(tmp_path):
    parties = {"server": {"source": HOLDER["source"]}, "bank": BANK, "clinic": {"source": CLINIC["source"]}}
    whole = {**SHARED, "privacy": PRIVATE, "parties": parties}
    with pytest.raises(ConfigError, match="VFL-5105"):
        from_document(whole)
    for name in ("bank", "clinic"):
        parties[name] = {**parties[name], "privacy": {"mu_max": 1.0}}
    assert from_document(whole).of("bank").privacy.limit == 1.0


def test_a_party_s_section_cannot_change_what_all_share():
    own = {**BANK, "privacy": {"noise": 2.0, "mu_max": 1.0}}
    whole = {**SHARED, "privacy": {**PRIVATE, "mu_max": 1.0}, "parties": {"bank": own}}
    with pytest.raises(ConfigError, match=r"VFL-1027.*privacy\.noise.*2\.0.*1\.0"):
        from_document(whole)


def test_the_run_folder_s_copy_is_the_same_configuration(tmp_path):
    config = read_config(write(tmp_path, "clinic", CLINIC))
    (tmp_path / "config.toml").write_text(config.to_toml())
    copied = read_config(tmp_path / "config.toml")
    assert isinstance(copied, Config)
    assert copied == config
