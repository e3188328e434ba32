"""The commented starter configurations that `vafl init` writes."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from vafl.data.column_guess import task_of
from vafl.data.columns import no_column
from vafl.data.csv_files import header_of
from vafl.data.fitting import fit
from vafl.data.settings import LABEL_HOLDER, TableSettings
from vafl.data.tables import POSITION, Table
from vafl.errors import ConfigError, DataError
from vafl.privacy.settings import LabelSettings

_TEMPLATE = """# A vafl run. A key left out keeps its default; the resolved file is saved with the result.
seed = 0

[data]
name = "digits"

[partition]
clients = {clients}

[model]
embedding = "linear"      # linear, mlp, cnn, lstm, or your own package.module:Factory
head = "bias"             # bias: (logistic) regression on the sum; linear or mlp for a trained head
# hidden = [64]           # hidden units of an mlp embedding
# combine = "concat"      # what a linear or mlp head sees: "sum" or "concat"

[rule]
name = "async"            # async, t-sync, sync, centralised
# t = 2                   # for t-sync: how many different clients a step waits for
# delay_bound = 50        # ask for fresh embeddings before using any older than this

[schedule]
batch_size = 32
refresh = "lookahead"     # none (Algorithm 1 as written), random:R, all, lookahead

[optimiser]
name = "sgd"              # or any class of torch.optim, e.g. "Adam"
step_size = 0.1
l2 = 0.001
{labels}
# [privacy]               # noise on what leaves a client; `vafl calibrate FILE --epsilon 8` prints a section
# mode = "dp_train"       # release_once, frozen, dp_train; each needs a budget, mu_max
# neighbours = "replace"  # no two values of a record can be told apart; zero_out promises less

[delays]
# The simulated clients' sleep: poisson, exponential, poisson-process, fixed, none, trace.
kind = "poisson"

[stop]
updates = 2000

[evaluation]
every = 50
"""


_BARE = re.compile(r"[A-Za-z0-9_-]+")
_MOST_NOTES = 20


def starter_digits(clients: int) -> str:
    """Return a configuration that runs without a file: scikit-learn's digits."""
    return _TEMPLATE.format(clients=clients, labels=_LABELS)


def starter_csv(csv: Path, label: str, clients: int) -> tuple[str, list[str]]:
    """Return a configuration for one file whose columns are dealt to clients, and notes for the user.

    Args:
        label: the label column; "" is the last column.

    Raises:
        DataError: The file, its label or its columns cannot be used.
    """
    if not csv.is_file():
        raise DataError("VFL-9141", f'vafl init needs a CSV or Parquet file. Found nothing at "{csv}".')
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
            f'"{csv}" has {len(features)} columns to learn from beside its label "{label}", too few for '
            f"{clients} clients. Lower --clients, or add columns. {'. '.join(notes[-5:])}",
        )
    notes.append(f'"{label}" is what is learnt, by {task}: it has {about_label}')
    notes.append(f"Between organisations, {LabelSettings().leak}.")
    if all(name.replace(".", "").isdigit() for name in columns):
        notes.append(f'All columns of "{csv}" have numbers for names: is its first line a record?')
    text = _ONE_FILE.format(
        path=_quoted(str(csv.resolve())),
        label=_quoted(label),
        ignore=", ".join(_quoted(name) for name in ignored if name),
        task=_quoted(task),
        groups=_groups(features, clients),
        settings=_SETTINGS.format(labels=_LABELS),
    )
    return text, notes


_SETTINGS = """# The defaults for tables follow. They need no tuning.
[model]
embedding = "tabular"      # or linear, mlp, or your own package.module:Factory
head = "tabular"
combine = "concat"
# metric = "auc"           # the figure that is shown first

[rule]
name = "async"             # async, t-sync, sync

[schedule]
batch_size = 0             # 0: by the number of rows, 64 to 1024
epochs = 0                 # passes over the rows, on average over the clients; 0: 40, fewer for many rows
refresh = "lookahead"

[optimiser]
name = "AdamW"
step_size = 0.002
schedule = "cosine"        # warms up, then falls to 0 at the last planned update
options = {{ betas = [0.9, 0.95], weight_decay = 0.01 }}
average = true             # keep the mean of each model over its recent steps
{labels}
# [privacy]                # noise on what leaves a client; `vafl calibrate FILE --epsilon 8` prints a section
# mode = "dp_train"        # release_once, frozen, dp_train; each needs a budget, mu_max
# neighbours = "replace"   # no two values of a record can be told apart; zero_out promises less

[stop]
updates = 0                # 0: as many as make the epochs
patience = 12              # or after 12 evaluations without a better one; the best model is kept

[evaluation]
every = 0                  # updates between evaluations; 0: once in an epoch
"""

_FRACTIONS = """test_fraction = 0.2        # kept for the result: nothing is chosen by it
validation_fraction = 0.1  # kept to end the training in time
"""

_ONE_FILE = (
    """# A vafl run on one file. A key left out keeps its default; the resolved file is saved with the result.
seed = 0

[data]
name = "csv"
path = {path}
label = {label}
ignore = [{ignore}]  # `vafl data` shows what becomes of every other column
task = {task:19} # "classification" or "regression"
"""
    + _FRACTIONS
    + """
# Who holds which columns; patterns such as "pay_*" work too.
[partition.groups]
{groups}

{settings}"""
)

_TABLES = (
    """# A vafl run on the parties' own tables. Every party has a file like this one, the same but for
# [tables.NAME], which is about its own table.
seed = 0

[data]
name = "tables"
parties = [{parties}]  # the clients, in one order everywhere; "server" holds the labels
records = "common"         # records that every party has; "labelled": all of the server's
task = {task:19} # the same at every party; "classification" or "regression"
"""
    + _FRACTIONS
    + """
{tables}

{settings}
[network]
address = "127.0.0.1:7443"   # the server's host, as the clients reach it
certificates = "certs"       # this party's folder of those that `vafl certs` made
"""
)

_LABELS = """
[labels]
# The gradients that clients receive reveal the label of every training row. Randomised response hides it:
# with two classes, epsilon = 2 keeps 88 % of the labels and flips the others. It costs accuracy.
epsilon = 0.0              # 0: not protected
"""

_SECTION = """[tables.{party}]
path = {path}
id = {id}          # whose line it is: text or whole numbers{more}"""
_FEATURES = """
# features = ["*"]         # columns to use, by name or pattern; left out: all others
{ignore}
# categories = []          # columns of numbers that are names of categories"""


def starter_tables(
    tables: Mapping[str, Path], parties: Sequence[str], id_column: str, label: str
) -> tuple[str, list[str]]:
    """A configuration for the tables at hand: one party's for its own machine, or all for this one.

    And what was decided for the user to know.

    Args:
        parties: all clients; none are those of `tables`.
        id_column: the id's name in every table; none is each table's first column that has a name.
        label: the label's name in the server's table; none is its last column. Clients do not use it.

    Raises:
        ConfigError, DataError: a table cannot be used.
    """
    clients = list(parties or [name for name in tables if name != LABEL_HOLDER])
    unknown = [name for name in tables if name not in (LABEL_HOLDER, *clients)]
    if not clients or unknown or len(set(clients)) < len(clients) or LABEL_HOLDER in clients:
        raise ConfigError(
            "VFL-9144",
            f'--parties names the clients, each once; "{LABEL_HOLDER}" is who holds the labels. Found '
            f"{', '.join(clients) or 'none'}, and a table of {', '.join(tables)}.",
        )
    headers = {name: _header(path) for name, path in tables.items()}
    if LABEL_HOLDER in tables:
        label = label or headers[LABEL_HOLDER][1][-1]
    elif label and not any(label in columns for _, columns in headers.values()):
        raise DataError(
            "VFL-9145",
            f'--label names the column to learn, which a client\'s table may have too. None has "{label}": '
            "leave it out.",
        )
    opened = [_open(name, path, *headers[name], id_column, label) for name, path in tables.items()]
    notes = [f'{own.party}: "{own.settings.id}" says whose line it is' for own in opened]
    task = "classification"
    if holder := next((own for own in opened if own.party == LABEL_HOLDER), None):
        task, about = task_of(_labels(holder), holder.path)
        notes.append(f'"{label}" is what is learnt, by {task}: it has {about}')
        if features := holder.features:
            shown = ", ".join(features[:5]) + (", ..." if len(features) > 5 else "")
            notes.append(
                f"{LABEL_HOLDER}: its other columns are features of the run ({len(features)}: {shown}); "
                "name in ignore those that are not known when a prediction is made"
            )
        notes.append(f"Between organisations, {LabelSettings().leak}.")
    sections = [_table_section(own, label) for own in opened]
    names = ", ".join(map(_quoted, clients))
    text = _TABLES.format(
        parties=names,
        task=_quoted(task),
        tables="\n\n".join(sections),
        settings=_SETTINGS.format(labels=_LABELS if LABEL_HOLDER in tables else ""),
    )
    return text, notes


_IGNORE_NONE = "# ignore = []              # columns not to use; `vafl data` shows what becomes of each"
_IGNORE_LABEL = "ignore = [{label}]         # the label is no feature"


def _open(
    party: str, path: Path, separator: str, columns: Sequence[str], id_column: str, label: str
) -> Table:
    """A party's table; whatever is wrong with the file is said now."""
    table = Table(
        party,
        TableSettings(
            str(path.resolve()),
            id_column or next(filter(None, columns), ""),
            separator=separator,
            label=label if party == LABEL_HOLDER else "",
        ),
    )
    table.ids()
    return table


def _labels(table: Table) -> pl.Series:
    """Those that are there, as numbers if all are."""
    label = table.settings.label
    values = table.values(label, table.schema[label])
    batches = [batch.select(values).to_series() for batch in table.all_batches([label])]
    labels = pl.concat(batches).drop_nulls()
    numbers = labels.cast(pl.Float64, strict=False)
    return labels if numbers.null_count() else numbers


def _table_section(table: Table, label: str) -> str:
    own, lines = table.settings, []
    if own.separator != ",":
        lines.append(f"separator = {_quoted(own.separator)}")
    if own.label:
        lines.append(f"label = {_quoted(own.label)}              # the column to learn")
    names = {"path": _quoted(own.path), "id": _quoted(own.id)}
    section = _SECTION.format(party=_key(table.party), more="".join(f"\n{line}" for line in lines), **names)
    if table.party == LABEL_HOLDER and not table.features:
        return section
    ignore = (
        _IGNORE_LABEL.format(label=_quoted(label))
        if label in table.schema and not own.label
        else _IGNORE_NONE
    )
    return section + _FEATURES.format(ignore=ignore)


def _key(name: str) -> str:
    """A name as one key of TOML, though it may have dots."""
    return name if _BARE.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    """As TOML writes text; it knows no pairs of \\u for one character, as JSON does."""
    return json.dumps(text, ensure_ascii=False)


def _header(path: Path) -> tuple[str, list[str]]:
    """The separator and the columns of a party's file."""
    if not path.is_file():
        raise DataError("VFL-9146", f'a table must be a CSV or Parquet file. Found nothing at "{path}".')
    return header_of(path)


def _notes(ignored: Mapping[str, str]) -> list[str]:
    """What is ignored, and why."""
    notes = [f"{name or 'a column without a name'} is ignored: {why}" for name, why in ignored.items()]
    if len(notes) > _MOST_NOTES:
        notes[_MOST_NOTES:] = [f"{len(notes) - _MOST_NOTES:,} more are ignored: data.ignore lists them"]
    return notes


def _groups(features: list[str], clients: int) -> str:
    """Equal consecutive shares, written out so that the user can move columns about."""
    lines = []
    size, extra = divmod(len(features), clients)
    start = 0
    for number in range(clients):
        end = start + size + (number < extra)
        lines.append(f"client-{number + 1} = [{', '.join(map(_quoted, features[start:end]))}]")
        start = end
    return "\n".join(lines)
