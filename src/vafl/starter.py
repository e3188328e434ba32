"""The commented starter configuration that `vafl init` writes."""

import json
from pathlib import Path

import polars as pl

from vafl.errors import DataError

_TEMPLATE = """# A vafl run. A key left out keeps its default; the resolved file is saved with the result.
seed = 0

[data]
{data}

[partition]
{partition}

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

[delays]
# The simulated clients' sleep: poisson, exponential, poisson-process, fixed, none, trace.
kind = "poisson"

[stop]
updates = 2000

[evaluation]
every = 50
"""


def starter_config(csv: Path | None, label: str, clients: int) -> str:
    """A configuration that runs: for the user's CSV, or for scikit-learn's digits without one."""
    if csv is None:
        return _TEMPLATE.format(data='name = "digits"', partition=f"clients = {clients}")
    numeric, other = _columns(csv)
    label = label or [*numeric, *other][-1]
    if label not in (*numeric, *other):
        known = ", ".join([*numeric, *other][:20])
        raise DataError(f'"{csv}" has no column "{label}". Its columns: {known}.')
    ignored = [name for name in other if name != label]
    features = [name for name in numeric if name != label]
    if len(features) < clients:
        raise DataError(
            f'"{csv}" has {len(features)} numeric feature columns, too few for {clients} clients. '
            "Lower --clients, or encode its text columns as numbers."
        )
    data = [
        'name = "csv"',
        f"path = {json.dumps(str(csv.resolve()))}",
        f"label = {json.dumps(label)}",
        f"ignore = [{', '.join(map(json.dumps, ignored))}]  # text columns: encode them to use them",
        'task = "classification"  # or "regression"',
    ]
    return _TEMPLATE.format(data="\n".join(data), partition=_groups(features, clients))


def _columns(csv: Path) -> tuple[list[str], list[str]]:
    try:
        schema = pl.scan_csv(csv, infer_schema_length=10_000).collect_schema()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f'"{csv}" must be a CSV file with a header line. {error}') from error
    numeric = [name for name, kind in schema.items() if kind.is_numeric() or kind == pl.Boolean]
    return numeric, [name for name in schema.names() if name not in numeric]


def _groups(features: list[str], clients: int) -> str:
    """Equal consecutive shares, written out so that the user can move columns about."""
    lines = ['# Who holds which columns; patterns such as "pay_*" work too.', "[partition.groups]"]
    size, extra = divmod(len(features), clients)
    start = 0
    for number in range(clients):
        end = start + size + (number < extra)
        lines.append(f"client-{number + 1} = [{', '.join(map(json.dumps, features[start:end]))}]")
        start = end
    return "\n".join(lines)
