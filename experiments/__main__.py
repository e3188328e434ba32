"""All experiments of the paper and some more, with one report.

    python -m experiments [STUDY ...] --data DIR [--out DIR] [--quick] [--seeds N] [--workers N] [--report]

Studies are the TOML files in experiments/studies; without names, all are run. Each run is saved as a folder
under DIR/runs and never repeated: an interrupted study continues where it stopped, and you can add seeds or
studies later. The report is DIR/index.html, with figures/ and results.json.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.drawings import draw
from experiments.harness import Place, run_study
from experiments.jobs import one_thread
from experiments.measures import Outcome, measure
from experiments.page import write_report
from experiments.study import Study, names, read_study
from vafl.errors import VaflError


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments().parse_args(argv)
    out = options.out or Path("build/experiments") / ("quick" if options.quick else "")
    data = "" if options.data is None else str(options.data.resolve())
    place = Place(data, (out / "runs").resolve(), options.workers, options.report)
    console = Console(stderr=True)
    try:
        with one_thread():
            studies = [_study(name, options) for name in options.studies or names()]
            studies = [study for study in studies if options.studies or not study.licensed]
            outcomes = [outcome for study in studies if (outcome := _outcome(study, place, out)) is not None]
    except VaflError as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return error.exit_code
    return write_report(out, outcomes, quick=options.quick)


def _study(name: str, options: argparse.Namespace) -> Study:
    study = read_study(name)
    if options.quick:
        return study.scaled_down()
    return study.with_seeds(options.seeds) if options.seeds else study


def _outcome(study: Study, place: Place, out: Path) -> Outcome | None:
    """Run, measure and draw a study. Return None if it has no runs and none may be made."""
    found = run_study(study, place)
    if not found:
        return None
    outcome = measure(study, found)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    draw(outcome, out / "figures" / study.name)
    return outcome


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("studies", nargs="*", choices=[*names(), []], metavar="STUDY")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the data sets' folder; default: VAFL_DATA")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: build/experiments")
    parser.add_argument("--quick", action="store_true", help="one seed, no grid, short: a first look")
    parser.add_argument("--seeds", type=int, metavar="N", help="at most so many of each variant")
    parser.add_argument("--report", action="store_true", help="make no run: report what is there")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes to use (default 1)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
