from vafl.config import Config, from_document
from vafl.config.agreement import changeable, chosen_by_party, shared_settings, training_settings
from vafl.scope import declarations


def test_every_setting_declares_who_decides_it():
    undeclared = [f"{name}.{key}" for name, key, declared in declarations(Config) if declared.scope is None]
    assert undeclared == [".parties"]  # each party has its own section there


def test_parties_agree_on_what_decides_the_model_and_the_training():
    config = from_document({"seed": 3, "network": {"run_id": "loans"}, "model": {"metric": "accuracy"}})
    shared, training = shared_settings(config), training_settings(config)
    assert shared["seed"] == 3
    assert shared["model"]["head"] == "bias"
    assert "metric" not in shared["model"]
    assert not shared.keys() & {"network", "stop", "labels", "embedding", "optimiser"}
    assert training["stop"] == {"patience": 0}
    assert training["rule"]["name"] == "async"


def test_each_party_chooses_its_files_and_its_budget():
    assert chosen_by_party("privacy") == ("mu_max", "delta", "ledger")
    assert chosen_by_party("data") == ("path", "weight", "folder")


def test_a_resumed_run_may_change_how_it_trains_but_not_on_what():
    names = changeable()
    assert "optimiser.step_size" in names
    assert not any(name.startswith(("data.", "model.", "privacy.", "schedule.")) for name in names)
