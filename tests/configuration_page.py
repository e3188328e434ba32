"""Writes docs/configuration.md from the settings' own docstrings: `python -m tests.configuration_page`."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import get_args

from vafl.config import Config

_INTRO = """# Configuration

Every key of a run's TOML, with its default. A key left out keeps the default; an unknown key is an error
with a suggestion; `--set section.key=value` overrides the file. This page is made from the code
(`python -m tests.configuration_page`), and a test keeps it so.
"""


def configuration_page():
    """The page as text."""
    sections = []
    for field in dataclasses.fields(Config):
        if dataclasses.is_dataclass(field.type):
            sections.append(_section(field.name, field.type))
        elif dataclasses.is_dataclass(own := get_args(field.type)[-1:] and get_args(field.type)[-1]):
            sections.append(_section(f"{field.name}.NAME", own))
    return "\n".join([_INTRO, _section("", Config), *sections])


def _section(name, kind):
    docstring = inspect.cleandoc(kind.__doc__)
    summary = docstring.partition("\n\n")[0]
    heading = f"## [{name}]\n\n{summary}" if name else "## At the top"
    notes = _notes(docstring)
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        if not dataclasses.is_dataclass(field.type):
            meaning = notes[field.name].replace("|", "\\|")
            rows.append(f"| `{field.name}` | `{_default(field)}` | {meaning} |")
    return f"{heading}\n\n" + "\n".join(rows) + "\n"


def _default(field):
    if field.default is field.default_factory is dataclasses.MISSING:
        return "needed"
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    if isinstance(value, tuple):
        return str(list(value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _notes(docstring):
    """Attribute name -> its description, from a Google docstring."""
    body = docstring.partition("Attributes:\n")[2]
    entries = re.split(r"^    (\w+): ", body, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}


if __name__ == "__main__":
    page = Path(__file__).parent.parent / "docs" / "configuration.md"
    page.write_text(configuration_page(), encoding="utf-8")
