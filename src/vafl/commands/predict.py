"""`vafl predict`: score all records with a trained model. Each party runs its own process."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from vafl.commands.deployed import add_model_options
from vafl.config import Config
from vafl.run.predict import Scored, predict

_SCORES = "scores.csv"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vafl predict`."""
    add_model_options(parser, _predict)
    parser.add_argument(
        "--out", type=Path, help=f"server only: the output file, .csv or .parquet ({_SCORES})"
    )


def _predict(config: Config, options: argparse.Namespace, console: Console) -> None:
    scored = predict(
        config,
        options.model,
        options.out or Path(_SCORES),
        console,
        lambda address: console.print(f"listening on {address}"),
        accept_ledger=options.accept_ledger,
    )
    console.print(f"{scored.records:,} records are scored in {scored.path}")
    for party, count in scored.missing.items():
        console.print(
            Text.assemble(
                (f"{party} did not answer for {count:,} of them:", "yellow"),
                " its default embedding was used",
            )
        )
    if scored.unscored:
        console.print(Text.assemble((_count(scored), "yellow"), _remedy(scored)))


def _count(scored: Scored) -> str:
    total = scored.records + scored.unscored
    return f"{scored.unscored:,} of the {total:,} records in your table have no score:"


def _remedy(scored: Scored) -> str:
    """Return why records have no score, and the remedy."""
    if scored.model_records == "labelled":
        return (
            " they are not in the alignment. To score all records, align these data again with "
            'data.records = "labelled".'
        )
    return (
        " not every party has them, or they were added after the alignment. To score all records, train "
        'with data.records = "labelled", and align these data with it too.'
    )
