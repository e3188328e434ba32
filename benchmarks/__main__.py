"""python -m benchmarks [--only NAME] [--out FILE]: run benchmarks, show and save their figures.

Exit codes: 0 if all targets were met, 1 if one was missed, 2 for a wrong command line.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.harness import Benchmark, discover, is_met, read_entries, select, table, write_entries


def main(arguments: Sequence[str], benchmarks: Mapping[str, Benchmark], console: Console) -> int:
    """Run the benchmarks that the command line names. Save each figure as soon as it is known."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Figures and targets.")
    parser.add_argument("--only", default="", metavar="NAME", help="a benchmark, or a prefix of some")
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"), metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        chosen = select(benchmarks, options.only)
        entries = read_entries(options.out) if options.only else {}
    except ValueError as error:
        parser.error(str(error))
    for one in chosen:
        console.print(f"measuring {one.name} ...", style="dim")
        entries[one.name] = one.entry()
        write_entries(options.out, entries)
    measured = [(one.name, entries[one.name]) for one in chosen]
    missed = [name for name, entry in measured if not is_met(entry)]
    console.print(table(measured))
    console.print(f"{options.out}: " + (f"missed: {', '.join(missed)}" if missed else "every target was met"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], discover("benchmarks"), Console()))
