"""The commented starter configurations that `vafl init` writes."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import tomli_w

from vafl.config import Config
from vafl.data.column_guess import task_of
from vafl.data.columns import no_column
from vafl.data.csv_files import header_of
from vafl.data.fitting import fit
from vafl.data.source_settings import SourceSettings, TableSettings
from vafl.data.tables import POSITION, Table
from vafl.errors import ConfigError, DataError
from vafl.names import SERVER
from vafl.privacy.settings import LabelSettings

_TEMPLATE = """# A vafl run. Omitted keys keep their defaults; the run folder has a copy with all keys.
seed = 0

[data]
name = "digits"

[partition]
clients = {clients}

[embedding]
model = "linear"          # linear, mlp, cnn, lstm, transformer, or your own package.module:Factory
# hidden = [64]           # hidden units of an mlp

[model]
head = "bias"             # bias: (logistic) regression on the sum; linear or mlp for a trained head
# combine = "concat"      # input of the head: "sum" (not for gated) or "concat" of the embeddings

[rule]
name = "async"            # async, t-sync, sync, centralised
# t = 2                   # for t-sync: how many different clients a step waits for
# delay_bound = 50        # request fresh embeddings instead of using older ones than this

[schedule]
batch_size = 32
refresh = "lookahead"     # none (Algorithm 1 as written), random:R, all, lookahead

[optimiser]
name = "sgd"              # or any class of torch.optim, e.g. "Adam"
step_size = 0.1
l2 = 0.001
{labels}
# [privacy]               # noise on uploads; `vafl calibrate FILE --epsilon 8` prints a section
# mode = "dp_train"       # release_once, frozen, dp_train; each needs a budget, mu_max
# neighbours = "replace"  # no two values of a record can be told apart; zero_out promises less

[delays]
# The simulated delays of the clients: poisson, exponential, poisson-process, fixed, none, trace.
kind = "poisson"

[stop]
updates = 2000

[evaluation]
every = 50
"""


_BARE = re.compile(r"[A-Za-z0-9_-]+")
_MOST_NOTES = 20


def starter_digits(clients: int) -> str:
    """Return a configuration for scikit-learn's digits, which needs no file."""
    return _TEMPLATE.format(clients=clients, labels=_LABELS)


def starter_csv(csv: Path, label: str, clients: int) -> tuple[str, list[str]]:
    """Return a configuration for one file whose columns are dealt to clients, and notes for the user.

    Args:
        csv: the file.
        label: the label column; "" means the last column.
        clients: the number of clients.

    Raises:
        DataError: the file, its label or its columns cannot be used.
    """
    if not csv.is_file():
        raise DataError("VFL-9141", f'vafl init needs a CSV or Parquet file. Found no file at "{csv}".')
    separator, columns = header_of(csv)
    label = label or columns[-1]
    if label not in columns:
        raise no_column(csv, label, columns)
    table = Table("a client", TableSettings(str(csv.resolve()), "", label=label, separator=separator))
    task, about_label = task_of(_labels(table), csv)
    ids = table.ids()
    if missing := len(ids) - len(_labels(table)):
        raise DataError(
            "VFL-9142",
            f'"{csv}": every record needs a label. Found {missing:,} of {len(ids):,} lines without one in '
            f'"{label}". Drop those lines, or name another --label.',
        )
    _, reports = fit(table, pl.DataFrame({"id": ids, POSITION: np.arange(len(ids))}))
    features = [report.name for report in reports if report.use != "dropped"]
    ignored = {report.name: report.why for report in reports if report.use == "dropped"}
    ignored.pop(label)
    notes = _notes(ignored)
    if len(features) < clients:
        raise DataError(
            "VFL-9143",
            f'"{csv}" has {len(features)} feature columns beside its label "{label}", too few for '
            f"{clients} clients. Lower --clients, or add columns. {'. '.join(notes[-5:])}",
        )
    notes.append(f'"{label}" is the label, for a {task}: it has {about_label}')
    notes.append(f"Between organisations, {LabelSettings().leak}.")
    if all(name.replace(".", "").isdigit() for name in columns):
        notes.append(
            f'All column names of "{csv}" are numbers. Is its first line a record instead of a header?'
        )
    text = _ONE_FILE.format(
        path=_quoted(str(csv.resolve())),
        label=_quoted(label),
        ignore=", ".join(_quoted(name) for name in ignored if name),
        task=_quoted(task),
        groups=_groups(features, clients),
        settings=_EMBEDDING + _SHARED.format(labels=_LABELS, optimiser=_STEPS, example='"client-1"'),
    )
    return text, notes


_SHARED = """# The defaults for tables follow. They need no tuning.
[model]
head = "tabular"
combine = "concat"
# width = {{ {example} = 64 }}   # the width of a client's embeddings; default: 32

[rule]
name = "async"             # async, t-sync, sync
lead = 2.0                 # a fast client makes at most twice as many uploads as the slowest one

[schedule]
batch_size = 0             # 0: 64 to 1024, depending on the number of rows
epochs = 0                 # passes over the rows, on average over the clients; 0: 40, fewer for many rows
refresh = "lookahead"

[optimiser]
schedule = "cosine"        # warms up, then falls to 0 at the last planned update
{optimiser}{labels}
# [privacy]                # noise on uploads; `vafl calibrate FILE --epsilon 8` prints a section
# mode = "dp_train"        # release_once, frozen, dp_train; each needs a budget, mu_max
# neighbours = "replace"   # no two values of a record can be told apart; zero_out promises less

[stop]
updates = 0                # 0: as many as the epochs need
patience = 12              # stop after 12 evaluations without improvement; the best model is kept

[evaluation]
every = 0                  # updates between evaluations; 0: once per epoch
"""

_STEPS = """name = "AdamW"
step_size = 0.002
options = { betas = [0.9, 0.95], weight_decay = 0.01 }
average = true             # keep the mean of each model over its recent steps
"""

_OWN_STEPS = (
    """
# The network that makes this party's embeddings, and its optimiser. The defaults need no tuning.
[embedding]
model = "auto"             # by the kind of data: tabular, cnn, lstm, mlp; or package.module:Factory

[optimiser]
"""
    + _STEPS
)

_EMBEDDING = """[embedding]
model = "auto"             # by the kind of data: tabular, cnn, lstm, mlp; or package.module:Factory

"""

_FRACTIONS = """test_fraction = 0.2        # held out for the final result
validation_fraction = 0.1  # held out for early stopping
"""

_ONE_FILE = (
    """# A vafl run on one file. Omitted keys keep their defaults; the run folder has a copy with all keys.
seed = 0

[data]
name = "csv"
path = {path}
label = {label}
ignore = [{ignore}]  # `vafl data` shows how every other column is used
task = {task:19} # "classification" or "regression"
"""
    + _FRACTIONS
    + """
# The columns of each client; patterns such as "pay_*" work too.
[partition.groups]
{groups}

{settings}"""
)

_DATA = (
    """seed = 0

[data]
name = "parties"           # every party has its own data
parties = [{parties}]  # the clients; "server" holds the labels
records = "common"         # records that every party has; "labelled": all of the server's
task = {task:19} # "classification" or "regression"
"""
    + _FRACTIONS
)

_ALL_PARTIES = (
    """# A vafl run on the data of several parties on one machine. For parties on several machines, run
# `vafl init` at each party, with its own data only.
"""
    + _DATA
    + """
# What each party decides alone. A party can also have [parties.NAME.embedding] and [parties.NAME.optimiser].
{sources}

{settings}
[network]
address = "127.0.0.1:7443"
certificates = "certs"
"""
)

_FEDERATION = (
    """# What all parties of this federation agree on. Every party has the same file: edit it together.
# What one party decides alone is in its own file.
"""
    + _DATA
    + """
{settings}"""
)

_PARTY = """# What {party} decides alone. The other parties never see this file.
party = {quoted}
federation = "federation.toml"   # what all parties agree on

{source}
{steps}
[network]
address = "127.0.0.1:7443"   # the server's address, as this party reaches it
certificates = "certs"       # this party's folder from `vafl certs`

# [privacy]
# mu_max = 1.0               # the most privacy that may be spent on one record; `vafl calibrate` explains it
"""

_LABELS = """
[labels]
# The gradients that clients receive reveal the label of every training row. Randomised response hides it:
# with two classes, epsilon = 2 keeps 88 % of the labels and flips the others. It costs accuracy.
epsilon = 0.0              # 0: not protected
"""

_SECTION = """[{section}]
path = {path}
id = {id}          # the column with the record ids: text or whole numbers{more}"""
_FEATURES = """
# features = ["*"]         # columns to use, by name or pattern; default: all others
{ignore}
# categories = []          # numeric columns whose numbers are categories"""


@dataclass(frozen=True)
class Starter:
    """The configuration of a federation that `vafl init` writes.

    Attributes:
        files: file name -> content: one file for all parties, or the shared file and a party's own.
        notes: what was decided for the user.
    """

    files: dict[str, str]
    notes: list[str]


def starter_sources(
    given: Mapping[str, SourceSettings], parties: Sequence[str], label: str, shared: Config | None = None
) -> Starter:
    """Return the configuration of one party, or of all parties in one file.

    Args:
        given: party -> its data: one party's or all parties'. The first named column of a table without an
            id is its id.
        parties: all clients; empty means those in `given`, or those of `shared`.
        label: the label column of the server's table; "" means its last column. Clients do not use it.
        shared: the shared file that this party has received. None writes one.

    Raises:
        ConfigError, DataError: a source cannot be used.
    """
    clients = list(parties or (shared.data.parties if shared else [name for name in given if name != SERVER]))
    unknown = [name for name in given if name not in (SERVER, *clients)]
    if not clients or unknown or len(set(clients)) < len(clients) or SERVER in clients:
        raise ConfigError(
            "VFL-9144",
            f'--parties must name every client once, without "{SERVER}", the label holder. Found '
            f"{', '.join(clients) or 'none'}, and data of {', '.join(given)}.",
        )
    tables = {name: own for name, own in given.items() if isinstance(own, TableSettings)}
    headers = {name: _header(Path(own.path)) for name, own in tables.items()}
    if SERVER in tables:
        label = label or headers[SERVER][1][-1]
    elif label and not any(label in columns for _, columns in headers.values()):
        raise DataError(
            "VFL-9145",
            f'--label must be a column of a table. Found "{label}", which no client\'s table has. Remove '
            "--label.",
        )
    opened = [_open(name, own, *headers[name], label) for name, own in tables.items()]
    notes = [f'{table.party}: "{table.settings.id}" is the id column' for table in opened]
    task: str = shared.data.task if shared else "classification"
    if holder := next((table for table in opened if table.party == SERVER), None):
        task, about = task_of(_labels(holder), holder.path)
        notes += _notes_on_holder(holder, task, about)
    names = {"parties": ", ".join(map(_quoted, clients)), "task": _quoted(task)}
    sections = {table.party: partial(_table_section, table, label) for table in opened}
    sections |= {name: partial(_source_section, own) for name, own in given.items() if name not in sections}
    if len(given) > 1:
        sources = "\n\n".join(make(f"parties.{_key(name)}.source") for name, make in sections.items())
        settings = _EMBEDDING + _SHARED.format(labels=_LABELS, optimiser=_STEPS, example=_key(clients[0]))
        return Starter({"": _ALL_PARTIES.format(sources=sources, settings=settings, **names)}, notes)
    party, make = next(iter(sections.items()))
    steps = _OWN_STEPS
    own = _PARTY.format(party=party, quoted=_quoted(party), source=make("source"), steps=steps)
    files = {"party.toml": own}
    if shared is None:
        settings = _SHARED.format(labels=_LABELS, optimiser="", example=_key(clients[0]))
        files["federation.toml"] = _FEDERATION.format(settings=settings, **names)
    return Starter(files, notes)


def _notes_on_holder(holder: Table, task: str, about: str) -> list[str]:
    """Return notes on the labels and the features of the label holder."""
    notes = [f'"{holder.settings.label}" is the label, for a {task}: it has {about}']
    if features := holder.features:
        shown = ", ".join(features[:5]) + (", ..." if len(features) > 5 else "")
        notes.append(
            f"{SERVER}: its other columns are features of the run ({len(features)}: {shown}); add "
            "those that are unknown at prediction time to ignore"
        )
    notes.append(f"Between organisations, {LabelSettings().leak}.")
    return notes


def _source_section(own: SourceSettings, section: str) -> str:
    """Return the section of a source other than a table."""
    values = {key: value for key, value in vars(own).items() if value and key != "alignment"}
    return f"[{section}]\n{tomli_w.dumps(values)}".rstrip()


_IGNORE_NONE = "# ignore = []              # columns not to use; `vafl data` shows how each column is used"
_IGNORE_LABEL = "ignore = [{label}]         # the label is not a feature"


def _open(party: str, own: TableSettings, separator: str, columns: Sequence[str], label: str) -> Table:
    """Open a party's table, and read its ids now to report a bad file early."""
    id_column = own.id or next(filter(None, columns), "")
    label = label if party == SERVER else ""
    table = Table(party, replace(own, id=id_column, separator=separator, label=label))
    table.ids()
    return table


def _labels(table: Table) -> pl.Series:
    """Return the labels that are not null, as numbers if all of them are numeric."""
    label = table.settings.label
    values = table.values(label, table.schema[label])
    batches = [batch.select(values).to_series() for batch in table.all_batches([label])]
    labels = pl.concat(batches).drop_nulls()
    numbers = labels.cast(pl.Float64, strict=False)
    return labels if numbers.null_count() else numbers


def _table_section(table: Table, label: str, section: str) -> str:
    """Return the section of a table."""
    settings, lines = table.settings, []
    if settings.separator != ",":
        lines.append(f"separator = {_quoted(settings.separator)}")
    if settings.label:
        lines.append(f"label = {_quoted(settings.label)}              # the column to predict")
    names = {"path": _quoted(settings.path), "id": _quoted(settings.id)}
    text = _SECTION.format(section=section, more="".join(f"\n{line}" for line in lines), **names)
    if table.party == SERVER and not table.features:
        return text
    ignore = (
        _IGNORE_LABEL.format(label=_quoted(label))
        if label in table.schema and not settings.label
        else _IGNORE_NONE
    )
    return text + _FEATURES.format(ignore=ignore)


def _key(name: str) -> str:
    """Return a name as one TOML key, quoted if it has dots or other special characters."""
    return name if _BARE.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    """Return a TOML string. TOML forbids JSON's surrogate pairs of \\u, so characters are not escaped."""
    return json.dumps(text, ensure_ascii=False)


def _header(path: Path) -> tuple[str, list[str]]:
    """Return the separator and the columns of a party's file."""
    if not path.is_file():
        raise DataError("VFL-9146", f'a table must be a CSV or Parquet file. Found no file at "{path}".')
    return header_of(path)


def _notes(ignored: Mapping[str, str]) -> list[str]:
    """Return notes about the ignored columns and the reasons."""
    notes = [f"{name or 'a column without a name'} is ignored: {why}" for name, why in ignored.items()]
    if len(notes) > _MOST_NOTES:
        notes[_MOST_NOTES:] = [f"{len(notes) - _MOST_NOTES:,} more are ignored: data.ignore lists them"]
    return notes


def _groups(features: list[str], clients: int) -> str:
    """Return equal consecutive shares of the columns as TOML, so that the user can move columns."""
    lines = []
    size, extra = divmod(len(features), clients)
    start = 0
    for number in range(clients):
        end = start + size + (number < extra)
        lines.append(f"client-{number + 1} = [{', '.join(map(_quoted, features[start:end]))}]")
        start = end
    return "\n".join(lines)
