"""`vafl report`: the reports of finished runs, written again."""

import argparse
from pathlib import Path

from rich.console import Console

from vafl.config import read_config
from vafl.observe.record import read_run
from vafl.run.launch import report_run


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vafl report`."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of finished runs")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> None:
    """Write RUN/report.html of each run, from what is in the folder now."""
    for path in options.runs:
        read_run(path)  # says what is wrong with a folder that is none of a finished run
        console.print(f"report: {report_run(read_config(path / 'config.toml'), path)}")
