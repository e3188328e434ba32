"""`vafl report`: write the reports of finished runs again."""

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
    """Write RUN/report.html of each run, from the current content of its folder."""
    for path in options.runs:
        read_run(path)  # raises if this is not the folder of a finished run
        console.print(f"report: {report_run(read_config(path / 'config.toml'), path)}")
