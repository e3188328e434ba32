"""API keys: made, stored as digests, recognised, revoked; and what is refused."""

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.cli import main
from vafl.errors import ConfigError
from vafl.transport.identity import Callers, add_key, api_keys, read_keys, remove_key


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.toml"


@pytest.fixture
def keys(path):
    """Two keys: name -> key."""
    return {name: add_key(path, name) for name in ("reports", "prometheus")}


def test_each_key_is_recognised_by_its_name_and_stored_nowhere(path, keys):
    callers = Callers(path)
    assert {name: callers.name_of(key) for name, key in keys.items()} == {name: name for name in keys}
    assert len(set(keys.values())) == 2
    assert not any(key in path.read_text() for key in keys.values())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@given(st.text())
def test_no_other_text_is_a_key(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    key = add_key(path, "reports")
    callers = Callers(path)
    for wrong in (text, key + text, text + key, key[: len(text)]):
        assert callers.name_of(wrong) == ("reports" if wrong == key else None)


def test_the_digest_is_not_a_key(path, keys):
    assert Callers(path).name_of(read_keys(path)["reports"].digest) is None


def test_a_name_stands_for_one_key(path, keys):
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"VFL-6143.*reports"):
        add_key(path, "reports")
    assert path.read_bytes() == before


def test_a_removed_key_is_refused_and_the_last_one_may_go(path, keys, monkeypatch):
    monkeypatch.setattr(api_keys, "_RECHECK", 0.0)
    callers = Callers(path)
    remove_key(path, "reports")
    assert callers.name_of(keys["reports"]) is None
    assert callers.name_of(keys["prometheus"]) == "prometheus"
    remove_key(path, "prometheus")
    assert callers.name_of(keys["prometheus"]) is None
    with pytest.raises(ConfigError, match="VFL-6145"):
        Callers(path)
    with pytest.raises(ConfigError, match=r"VFL-6144.*reports"):
        remove_key(path, "reports")


def test_a_file_that_is_spoilt_or_gone_leaves_the_keys_as_they_were(path, keys, monkeypatch):
    monkeypatch.setattr(api_keys, "_RECHECK", 0.0)
    callers = Callers(path)
    path.write_text("[reports")
    assert callers.name_of(keys["reports"]) == "reports"
    path.unlink()
    assert callers.name_of(keys["reports"]) == "reports"


@pytest.mark.parametrize(
    "text",
    [
        "[reports",
        "reports = 1",
        '[reports]\ndigest = "00"\ncreated = ""',
        f'[reports]\ndigest = "{"g" * 64}"\ncreated = ""',
        f'[reports]\ndigest = "{"0" * 64}"',
        f'[reports]\ndigest = "{"0" * 64}"\ncreated = ""\nmore = 1',
        f'["../reports"]\ndigest = "{"0" * 64}"\ncreated = ""',
        "\x00",
    ],
)
def test_what_is_not_a_file_of_keys_is_refused(path, text):
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="VFL-6142"):
        read_keys(path)


def test_a_file_that_others_can_read_is_refused(path, keys):
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="VFL-6176"):
        Callers(path)


@pytest.mark.parametrize("name", ["", "../x", "a b", "a\nb", "-x", "x" * 64])
def test_a_name_must_be_plain(path, name):
    with pytest.raises(ConfigError, match="VFL-6146"):
        add_key(path, name)
    assert not path.exists()


def test_the_command_prints_a_key_once(path, capsys):
    assert main(["keys", "add", str(path), "reports"]) == 0
    key = capsys.readouterr().out.split()[0]
    assert Callers(path).name_of(key) == "reports"
    assert main(["keys", "list", str(path)]) == 0
    listed = capsys.readouterr().out
    assert "reports" in listed
    assert key not in listed
    assert main(["keys", "remove", str(path), "reports"]) == 0
    assert main(["keys", "remove", str(path), "reports"]) == 2
    assert main(["keys", "list", str(path.parent / "none.toml")]) == 2
