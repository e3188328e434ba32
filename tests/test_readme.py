"""The README tells the truth: its example is the tested one, its files and commands exist."""

import re
from pathlib import Path

import pytest

from vafl.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_is_the_one_that_is_tested():
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    assert block == (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")


def test_every_file_it_links_to_exists():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_command_it_shows_exists(capsys):
    commands = set(re.findall(r"^vafl (\w+)", README, re.MULTILINE))
    assert commands
    with pytest.raises(SystemExit):
        main(["--help"])
    usage = capsys.readouterr().out
    for command in commands:
        assert re.search(rf"^    {command}\b", usage, re.MULTILINE), command


def test_make_has_the_targets_it_names():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile, target


def test_the_configuration_page_is_what_the_code_says():
    from tests.configuration_page import configuration_page

    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == configuration_page()
