"""`vafl predict` and `vafl serve`: what only the server can be told is not silently lost on a client."""

import pytest

from vafl.cli import main


@pytest.mark.parametrize(("command", "option"), [("predict", "--out"), ("serve", "--http")])
def test_an_option_of_the_server_is_refused_at_a_client(capsys, tmp_path, command, option):
    (tmp_path / "run.toml").write_text("")
    own = ["--party", "client-1", "--model", str(tmp_path), option, "scores.csv"]
    assert main([command, str(tmp_path / "run.toml"), *own]) == 2
    assert f"{option} is for the server. Found it with --party client-1" in capsys.readouterr().err
