"""`vafl predict` and `vafl serve`: a client refuses options that only the server can use."""

import pytest

from vafl.cli import main


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("predict", "--out"),
        *(("serve", option) for option in ("--http", "--keys", "--tls-certificate", "--tls-key")),
    ],
)
def test_an_option_of_the_server_is_refused_at_a_client(capsys, tmp_path, command, option):
    (tmp_path / "run.toml").write_text("")
    own = ["--party", "client-1", "--model", str(tmp_path), option, "scores.csv"]
    assert main([command, str(tmp_path / "run.toml"), *own]) == 2
    error = capsys.readouterr().err
    assert f"VFL-9061: {option} " in error
    assert "--party client-1" in error


@pytest.mark.parametrize(
    "options",
    [["--tls", "--tls-key", "k"], ["--tls-key", "k"], ["--tls-certificate", "c"]],
)
def test_tls_takes_the_partys_files_or_two_others(capsys, tmp_path, options):
    (tmp_path / "run.toml").write_text("")
    assert main(["serve", str(tmp_path / "run.toml"), "--model", str(tmp_path), *options]) == 2
    assert "--tls-certificate and --tls-key" in " ".join(capsys.readouterr().err.split())
