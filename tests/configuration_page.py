"""Write docs/configuration.md from the docstrings of the settings: `python -m tests.configuration_page`."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import get_args

from vafl.config import Config
from vafl.config.schema import TABLE_DEFAULTS
from vafl.data.source_settings import SOURCES
from vafl.scope import Scope, declarations

_INTRO = """# Configuration

Every key of the configuration, with its default. A key that is left out keeps the default. An unknown key is
an error with a suggestion. `--set section.key=value` overrides the files.

## The files

With data.name = "parties", each party has its own data and its own model. Two files describe a run:

- `federation.toml` holds what all parties agree on. Every party has the same file.
- `party.toml` holds what one party chooses alone. It stays with this party.

`vafl init` writes both, and `vafl check party.toml` checks them. Commands take the party's file, which names
the other one. Relative paths start at the folder of the file that holds them. A small `federation.toml`:

```toml
seed = 0

[data]
name = "parties"
parties = ["bank", "shop"]             # the clients; "server" holds the labels
test_fraction = 0.2
validation_fraction = 0.1

[network]
run_id = "churn"
```

The bank's `party.toml`:

```toml
party = "bank"
federation = "federation.toml"

[source]
path = "bank.csv"
id = "customer"

[embedding]
model = "auto"

[network]
address = "server.example:7443"
certificates = "certs"
```

A party's file has no section `[parties.NAME]`. It has `[source]` in place of `[parties.NAME.source]`, and
likewise `[embedding]`, `[optimiser]`, `[privacy]` and, at the top, `local_steps`.

For parties on one machine (`vafl run`, `vafl up`), one file can hold everything:

```toml
[data]
name = "parties"

[parties.server.source]
path = "labels.csv"
id = "customer"
label = "churned"

[parties.bank.source]
path = "bank.csv"
id = "customer"

[parties.bank.embedding]
model = "mlp"                          # other parties use the section [embedding], if there is one
```

If data.parties is left out, the sections in one file name the clients, in their order. Data sets other than
"parties" are always configured in one file. [parties.md](parties.md) explains sources and models by example.

## Who decides

| in the tables below | who reads the setting | which file may hold it |
|---|---|---|
| `all parties` | every party needs the same value, and the trained model keeps it | `federation.toml` |
| `all parties, in training` | every party needs the same value while it trains | `federation.toml` |
| `server` | only the server | `federation.toml`, or the server's `party.toml` |
| `each party` | each party chooses its own value | `party.toml` |

A setting in the wrong file is an error that names the right one. When a client joins, the server compares the
settings of all parties, and refuses a client that differs.

## Defaults for the parties' own data

With data.name = "parties" or "csv", some defaults differ from those in the tables below:

{defaults}

They apply unless [embedding] names another model than "auto" and "tabular", or there is a section [privacy].
With two files, only `federation.toml` counts, so all parties have the same defaults.

This page is made from the code (`python -m tests.configuration_page`), and a test keeps it so.
"""


def configuration_page():
    """Return the page."""
    sections = []
    for field in dataclasses.fields(Config):
        if dataclasses.is_dataclass(field.type):
            sections.append(_section(field.name, field.type))
        elif dataclasses.is_dataclass(own := get_args(field.type)[-1:] and get_args(field.type)[-1]):
            sections.append(_section(f"{field.name}.NAME", own))
            sections += [_source_section(kind, source) for kind, source in SOURCES.items()]
    return "\n".join([_intro(), _section("", Config), *sections])


def _intro():
    """Return the introduction with the defaults for the parties' own data."""
    rows = ["| key | default |", "|---|---|"]
    for section, values in TABLE_DEFAULTS.items():
        rows += [f"| `{section}.{key}` | {_shown(value)} |" for key, value in values.items()]
    return _INTRO.replace("{defaults}", "\n".join(rows))


def _source_section(name, kind):
    """Return the section of one kind of source. `kind` itself is in the heading."""
    summary, notes = _described(kind)
    chosen = "This is the default kind." if name == "table" else f'Set `kind = "{name}"`.'
    rows = ["| key | default | meaning |", "|---|---|---|"]
    rows += [
        f"| `{field.name}` | {_default(field)} | {notes[field.name]} |"
        for field in dataclasses.fields(kind)
        if field.name != "kind"
    ]
    heading = f'## [parties.NAME.source], kind = "{name}"\n\n{summary}'
    return f"{heading}\n\n{chosen} In `party.toml` the section is `[source]`.\n\n" + "\n".join(rows) + "\n"


def _described(kind):
    """Return the docstring's text above the attributes, and attribute name -> description."""
    docstring = inspect.cleandoc(kind.__doc__)
    summary = docstring.partition("Attributes:\n")[0].strip()
    return summary, {name: text.replace("|", "\\|") for name, text in _notes(docstring).items()}


def _section(name, kind):
    summary, notes = _described(kind)
    heading = f"## [{name}]\n\n{summary}" if name else "## At the top"
    rows = ["| key | default | who decides | meaning |", "|---|---|---|---|"]
    scopes = {key: declared.scope for section, key, declared in declarations(Config) if section == name}
    for field in dataclasses.fields(kind):
        if not dataclasses.is_dataclass(field.type):
            scope = scopes.get(field.name) or Scope.PARTY
            rows.append(f"| `{field.name}` | {_default(field)} | {scope} | {notes[field.name]} |")
    return f"{heading}\n\n" + "\n".join(rows) + "\n"


def _default(field):
    if field.default is field.default_factory is dataclasses.MISSING:
        return "needed"
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    return _shown(value)


def _shown(value):
    if isinstance(value, tuple):
        value = list(value)
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return "`none`" if value is None else f"`{text}`"


def _notes(docstring):
    """Return attribute name -> description, from a Google docstring."""
    body = docstring.partition("Attributes:\n")[2]
    entries = re.split(r"^    (\w+): ", body, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}


if __name__ == "__main__":
    page = Path(__file__).parent.parent / "docs" / "configuration.md"
    page.write_text(configuration_page(), encoding="utf-8")
