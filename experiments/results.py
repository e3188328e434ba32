"""The output of an experiment: a folder with results.json, and a table of verdicts."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Verdict:
    """One claim: the measured value, the target, and whether it holds."""

    claim: str
    measured: str
    target: str
    holds: bool


def arguments(name: str, about: str, *, workers: bool = True) -> argparse.ArgumentParser:
    """Return the parser of the common options; with `workers`, the experiment can use several processes."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{name}", description=about)
    parser.add_argument("--out", type=Path, default=Path("build/experiments") / name, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="small, for a first look and for the tests")
    parser.add_argument("--data", type=Path, metavar="DIR", help="holds mnist/; default: VAFL_DATA")
    if workers:
        parser.add_argument(
            "--workers", type=int, default=2, metavar="N", help="processes to use (default 2)"
        )
    return parser


def publish(folder: Path, quick: bool, measured: dict[str, Any], verdicts: Sequence[Verdict]) -> int:
    """Write results.json and print the verdicts. Return exit code 0 if all hold, otherwise 1."""
    document = {"quick": quick, "verdicts": [asdict(verdict) for verdict in verdicts], "measured": measured}
    path = folder / "results.json"
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    table = Table("claim", "measured", "target", "holds")
    for verdict in verdicts:
        holds = "[green]yes[/]" if verdict.holds else "[red]no[/]"
        table.add_row(verdict.claim, verdict.measured, verdict.target, holds)
    console = Console()
    console.print(table)
    console.print(f"written: {path}", highlight=False, soft_wrap=True)
    return 0 if all(verdict.holds for verdict in verdicts) else 1
