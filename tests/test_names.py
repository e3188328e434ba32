"""Party names: which ones are accepted, and that none of them can leave the run folder."""

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from tests.companies import document, write_companies
from vafl.cli import main
from vafl.config import from_document
from vafl.errors import ConfigError
from vafl.names import check_party
from vafl.run.model_store import model_folder
from vafl.transport.identity import issue, make_authority

ESCAPES = ["../esc", "../../../esc", "/tmp/esc", "a/b", "..", ".", "", "a\0b", "-x", "a b", "x" * 64]
RESERVED = ["ca", "CA", "ca.pem", "Ca.Key", "Server", "SERVER", "Label-Holder"]


@pytest.mark.parametrize(
    "name",
    ["server", "label-holder", "client-1", "a", "7", "Bank.of_X-1", "x" * 63, "servers", "cab"],
)
def test_good_names(name):
    assert check_party(name) == name


@pytest.mark.parametrize("name", [*ESCAPES, "_a", ".a", "a\\b", "a\n", "ä", "a:b", "a%2f", "[/x]"])
def test_bad_names(name):
    with pytest.raises(ConfigError, match="VFL-1051"):
        check_party(name)


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_names(name):
    with pytest.raises(ConfigError, match=r"VFL-1052.*ca, ca\.key, ca\.pem, label\-holder, server"):
        check_party(name)


@given(st.text())
def test_an_accepted_name_is_one_component_of_a_path(name):
    try:
        check_party(name)
    except ConfigError:
        return
    assert name.isascii()
    assert not set(name) & set("/\\\0")
    assert name.strip(".")


@pytest.mark.parametrize("name", [*ESCAPES, *RESERVED])
@pytest.mark.parametrize(
    "sections",
    [
        lambda name: {"data": {"name": "parties", "parties": ["bank", name]}},
        lambda name: {"data": {"parties": [name]}},
        lambda name: {
            "data": {"name": "csv", "path": "a", "label": "b"},
            "partition": {"groups": {name: ["x"]}},
        },
        lambda name: {
            "data": {"name": "parties", "parties": ["bank"]},
            "parties": {name: {"source": {"path": "a", "id": "b"}}},
        },
    ],
    ids=["data.parties", "data.parties without tables", "partition.groups", "tables"],
)
def test_a_configuration_accepts_only_names_that_certificates_can_have(name, sections):
    with pytest.raises(ConfigError, match=r"name|party"):
        from_document(sections(name))


@pytest.mark.parametrize("name", ["server", "label-holder"])
def test_a_group_cannot_be_called_as_the_label_holder_is(name):
    """Its model would be written to the label holder's folders."""
    with pytest.raises(ConfigError, match=rf'partition\.groups.*Found "{name}"'):
        from_document({"partition": {"groups": {name: ["x"]}}})


def test_nobody_gets_a_certificate_of_the_label_holders_own_client(tmp_path):
    assert main(["certs", str(tmp_path / "certs"), "--party", "server", "--party", "label-holder"]) == 2
    assert not (tmp_path / "certs").exists()
    make_authority(tmp_path / "certs")
    with pytest.raises(ConfigError, match="label-holder"):
        issue(tmp_path / "certs", "label-holder")


def files_below(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize("command", ["run", "up"])
def test_a_group_that_names_a_path_writes_nothing_anywhere(tmp_path, command, capsys):
    home = tmp_path / "a" / "b" / "c" / "d"
    home.mkdir(parents=True)
    rows = "".join(f"{n},{n * n % 7},{n % 2}\n" for n in range(40))
    (home / "all.csv").write_text(f"x,z,y\n{rows}")
    groups = '[partition.groups]\n"../../../esc" = ["x"]\nshop = ["z"]\n'
    stop = '[stop]\nupdates = 5\n[schedule]\nbatch_size = 8\n[network]\naddress = "127.0.0.1:0"\n'
    (home / "run.toml").write_text(
        f'[data]\nname = "csv"\npath = "all.csv"\nlabel = "y"\n{groups}{stop}join_timeout = 100.0\n'
    )
    before = files_below(tmp_path)
    assert main([command, str(home / "run.toml"), "--out", str(home / "run")]) == 2
    assert "../../../esc" in capsys.readouterr().err
    assert files_below(tmp_path) == before


def test_a_party_of_tables_that_names_a_path_writes_nothing_anywhere(tmp_path, capsys):
    home = tmp_path / "a" / "b" / "c"
    write_companies(home)
    given = document(home)
    given["data"]["parties"] = ["bank", "../../esc"]
    given["parties"]["../../esc"] = given["parties"].pop("shop")
    (home / "run.toml").write_text(tomli_w.dumps(given))
    before = files_below(tmp_path)
    for command in ("run", "up"):
        assert main([command, str(home / "run.toml"), "--out", str(home / "run")]) == 2
    assert "../../esc" in capsys.readouterr().err
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("name", ["../../esc", "/tmp/esc", ".."])
def test_a_model_folder_is_inside_its_run(tmp_path, name):
    with pytest.raises(ConfigError, match="VFL-1051"):
        model_folder(tmp_path, name)
    assert main(["export", str(tmp_path), name, str(tmp_path / "out.onnx")]) == 2
