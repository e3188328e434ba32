"""Write docs/configuration.md from the docstrings of the settings: `python -m tests.configuration_page`."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import get_args

from vafl.config import Config
from vafl.scope import Scope, declarations

_INTRO = """# Configuration

Every key of a run's TOML, with its default. A key left out keeps the default; an unknown key is an error
with a suggestion; `--set section.key=value` overrides the file.

"Who decides" is the party whose file counts. `all parties` must have the same value, and the trained model
keeps it. `all parties, in training` must have the same value while they train: a client that differs is
refused when it joins. Only the server reads what the `server` decides. `each party` chooses its own value.

This page is made from the code
(`python -m tests.configuration_page`), and a test keeps it so.
"""


def configuration_page():
    """Return the page."""
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
    rows = ["| key | default | who decides | meaning |", "|---|---|---|---|"]
    scopes = {key: declared.scope for section, key, declared in declarations(Config) if section == name}
    for field in dataclasses.fields(kind):
        if not dataclasses.is_dataclass(field.type):
            meaning = notes[field.name].replace("|", "\\|")
            scope = scopes.get(field.name) or Scope.PARTY
            rows.append(f"| `{field.name}` | `{_default(field)}` | {scope} | {meaning} |")
    return f"{heading}\n\n" + "\n".join(rows) + "\n"


def _default(field):
    if field.default is field.default_factory is dataclasses.MISSING:
        return "needed"
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    if isinstance(value, tuple):
        return str(list(value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _notes(docstring):
    """Return attribute name -> description, from a Google docstring."""
    body = docstring.partition("Attributes:\n")[2]
    entries = re.split(r"^    (\w+): ", body, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}


if __name__ == "__main__":
    page = Path(__file__).parent.parent / "docs" / "configuration.md"
    page.write_text(configuration_page(), encoding="utf-8")
