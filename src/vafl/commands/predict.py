"""`vafl predict`: a trained model used on whole tables; each party runs its part."""

import argparse
from pathlib import Path

from rich.console import Console

from vafl.commands.configured import add_config_options, log_to_stderr, overrides
from vafl.config import read_config
from vafl.federation.prediction import answer, predict
from vafl.runtime.identity import SERVER


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `vafl predict`."""
    add_config_options(parser)
    parser.add_argument("--party", required=True, help=f'who this is; "{SERVER}" asks and writes the scores')
    parser.add_argument("--model", type=Path, required=True, metavar="RUN", help="where the model is")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("scores.csv"),
        help="the scores: .csv or .parquet (%(default)s)",
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> None:
    """One party's part."""
    log_to_stderr()
    config = read_config(options.config, overrides(options))
    if options.party != SERVER:
        console.print(f"the server is done: {answer(config, options.party, options.model)}")
        return
    scored = predict(
        config,
        options.model,
        options.out,
        console,
        lambda address: console.print(f"listening on {address}"),
    )
    console.print(f"{scored.records:,} records are scored in {scored.path}")
    for party, count in scored.missing.items():
        console.print(f"[yellow]{party} did not answer for {count:,} of them:[/] its default stands in")
