"""The `vafl` command. Each subcommand is a few lines on top of the library.

Imports are inside the commands, so that each one loads only what it needs. Start-up time matters: a
federation on one machine starts many of these processes, and each worker of an alignment imports this module
again.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vafl
from vafl.commands.configured import (
    add_client_options,
    add_config_options,
    add_ledger_option,
    log_to_stderr,
    overrides,
    party_of,
)
from vafl.errors import ConfigError, VaflError
from vafl.files import drafted
from vafl.names import SERVER

if TYPE_CHECKING:
    from rich.console import Console

    from vafl.config import Config
    from vafl.observe.record import RecordedRun

# Modules of vafl.commands, with the help text of each:
_LARGER = {
    "init": "write a commented starter configuration",
    "check": "check whether a party's files are complete, and show what the others must have",
    "align": "find the records that the parties share, privately, before a run",
    "certs": "create a certificate authority and the parties' certificates",
    "data": "show how a run will use the columns of the parties' data",
    "predict": "score every record of the parties' data",
    "serve": "answer HTTP requests for predictions, with live embeddings from the clients",
    "importance": "measure how much each party's features matter to a trained model",
    "keys": "create, list and remove the API keys of vafl serve",
    "report": "write the HTML report of a finished run again",
    "watch": "watch runs in a browser while they train",
    "inspect": "describe the trained models of a run",
    "export": "export one party's trained model as ONNX",
    "audit": "attack a configuration, and check whether it leaks more than it claims",
    "privacy": "show the privacy spent on records, and the budget left",
    "calibrate": "find the noise for a privacy budget, and the guarantee of given noise",
    "smoothness": "compute smoothness constants, and step sizes from them",
}
_EXIT_CODES = """exit codes:
  0 done    1 unexpected failure    2 configuration or usage    3 data
  4 the run could not go on (diverged, stalled)    5 run folder    6 an audit failed
  7 refused by the other party    8 a file could not be read or written    130 interrupted
"""
_FILE, _INTERRUPTED = 8, 130
_NUMBERED = "runs/NAME, or the next free runs/NAME-2, ...; --resume and --overwrite use the last one"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Turn vafl's errors and file errors into one message and a documented exit code."""
    from vafl.commands.display import Display

    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser(arguments[0] if arguments else "").parse_args(arguments)
    try:
        options.command(options, Display())
    except VaflError as error:
        _print_error(str(error))
        return error.exit_code
    except OSError as error:
        _print_error(_about_file(error))
        return _FILE
    except KeyboardInterrupt as interrupt:
        Display(stderr=True).print(f"interrupted: {interrupt}" if interrupt.args else "interrupted")
        return _INTERRUPTED
    return 0


def _print_error(message: str) -> None:
    from rich.text import Text

    from vafl.commands.display import Display

    Display(stderr=True).print(Text.assemble(("error:", "bold red"), f" {message}"))


def _about_file(error: OSError) -> str:
    where = f'"{drafted(os.fsdecode(error.filename))}": ' if error.filename else ""
    return (
        f"cannot read or write a file. Found {where}{error.strerror or error}. Check that the folder exists, "
        "that you have permission to write to it, and that its disk has free space."
    )


def _parser(chosen: str) -> argparse.ArgumentParser:
    """Make the parser. Of the commands in `_LARGER`, only the chosen one is imported and gets its options."""
    parser = argparse.ArgumentParser(
        prog="vafl",
        description="Vertical asynchronous federated learning.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"vafl {vafl.__version__}" if chosen == "--version" else ""  # the lookup is slow
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="command")

    run = commands.add_parser("run", help="train from a TOML file in the simulator, on a virtual clock")
    _add_run_options(run, _NUMBERED)
    run.set_defaults(command=_run)

    for name, text in (
        ("server", "run the server of a federation, which holds the labels and the head"),
        ("client", "join a run as a client, with one party's columns"),
        ("up", "run a whole federation on this machine, as separate processes"),
    ):
        party = commands.add_parser(name, help=text)
        _add_run_options(party, "runs/NAME-PARTY" if name == "client" else _NUMBERED)
        party.set_defaults(command={"server": _server, "client": _client, "up": _up}[name])
        if name == "client":
            party.add_argument("--party", help="the name of this party, if the file is for all parties")
            party.add_argument(
                "--join",
                action="store_true",
                help="join parties that start from an earlier run (--from), which this party was not in",
            )
            add_client_options(party)
        if name == "server":
            add_ledger_option(party)
        if name != "up":
            party.add_argument("--resume", action="store_true", help="continue from the last checkpoint")

    comparison = commands.add_parser("compare", help="compare several runs in a table and a plot")
    comparison.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    comparison.add_argument("--metric", help="the metric to compare by (default: the runs' headline metric)")
    comparison.add_argument(
        "--target", type=float, help="metric value to reach (default: the best that every run reached)"
    )
    comparison.add_argument(
        "--out", type=Path, help="the plot's path, without extension (default: comparison)"
    )
    comparison.add_argument("--json", action="store_true", help="print JSON instead of a table")
    comparison.set_defaults(command=_compare)

    demonstration = commands.add_parser("demo", help="train on digits with four clients, under every rule")
    demonstration.add_argument("--out", type=Path, default=Path("build/demo"))
    demonstration.set_defaults(command=_demo)
    for name, text in _LARGER.items():
        larger = commands.add_parser(name, help=text)
        if name == chosen:
            import_module(f"vafl.commands.{name}").add_options(larger)
    return parser


def _add_run_options(parser: argparse.ArgumentParser, default: str) -> None:
    add_config_options(parser)
    parser.add_argument("--out", type=Path, help=f"the run folder (default: {default})")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in the folder")
    parser.add_argument(
        "--from",
        dest="earlier",
        type=Path,
        metavar="RUN",
        help="start with the models of an earlier run, for new records, a changed party or a new one",
    )


def _config(options: argparse.Namespace) -> "Config":
    from vafl.config import read_config

    return read_config(options.config, overrides(options))


def _server(options: argparse.Namespace, console: "Console") -> None:
    from vafl.run.server import ServerRun

    log_to_stderr()
    config = _config(options)
    if config.party not in ("", SERVER):
        raise ConfigError(
            "VFL-9153",
            f'the server needs the file of "{SERVER}". Found the file of {config.party}: "{options.config}". '
            "Run `vafl client` with it.",
        )
    out = _folder(options, last=options.resume or options.overwrite)
    served = ServerRun(
        config,
        out,
        console,
        resume=options.resume,
        overwrite=options.overwrite,
        accept_ledger=options.accept_ledger,
        earlier=options.earlier,
    )
    _report(served.run(lambda address: console.print(f"listening on {address}")), console)


def _client(options: argparse.Namespace, console: "Console") -> None:
    from vafl.run.client import run_client

    log_to_stderr()
    config = _config(options)
    party = party_of(options, config.party)
    out = options.out or Path("runs") / f"{options.config.stem}-{party}"
    reason = run_client(
        config,
        party,
        out,
        resume=options.resume,
        overwrite=options.overwrite,
        replace=options.replace,
        accept_ledger=options.accept_ledger,
        console=console,
        earlier=options.earlier,
        joins=options.join,
    )
    console.print(f"the run is over: {reason}; the model is in {out / 'models'}")


def _up(options: argparse.Namespace, console: "Console") -> None:
    from vafl.run.up import up

    log_to_stderr()
    out = _folder(options, last=options.overwrite)
    recorded = up(_config(options), out, console, overwrite=options.overwrite, earlier=options.earlier)
    _report(recorded, console)


def _report(recorded: "RecordedRun", console: "Console") -> None:
    from vafl.observe.compare import figures_table
    from vafl.observe.record import REPORT
    from vafl.run.controller import Ending

    made, kept = recorded.summary["updates"], recorded.summary["kept"]
    console.print(figures_table(recorded))
    chosen = f", which had the best validation {kept['selected_by']}" if kept["selected_by"] else ""
    console.print(
        f"kept: the models of update {kept['updates']:,} of {made:,}{chosen}; the run is in {recorded.path}"
    )
    console.print(f"report: {recorded.path / REPORT}")
    _report_absences(recorded, console)
    if recorded.summary["ending"] == Ending.BUDGETS_SPENT.name:
        early = f"warning: it ended early, after {made:,} updates: {recorded.summary['ended']}"
        console.print(f"{early}; `vafl privacy {recorded.path}` shows the spending", style="yellow")
    else:
        console.print(f"it ended: {recorded.summary['ended']}")
    if decision := recorded.summary["decision"]:
        _report_decision(decision, console)
    labels = recorded.summary["labels"]
    if labels["epsilon"] is not None:
        chance = f"each kept with probability {labels['kept_with_probability']:.3f}"
        console.print(f"labels: epsilon {labels['epsilon']:g} by randomised response, {chance}")
    if any(labels["heuristics"].values()):
        console.print("the server clips or noises the gradients it returns: a heuristic without a guarantee")


def _report_absences(recorded: "RecordedRun", console: "Console") -> None:
    """Name the clients that took no part in the training, and those that joined after it began."""
    never = recorded.never_uploaded
    if never:
        console.print(
            f"warning: {', '.join(never)} never uploaded: the model learned nothing from their data",
            style="bold red",
        )
    late = [name for name in recorded.summary.get("missing_at_start", []) if name not in never]
    if late:
        console.print(
            f"warning: training began without {', '.join(late)}, which connected after network.join_timeout",
            style="yellow",
        )


def _report_decision(decision: Mapping[str, Any], console: "Console") -> None:
    """Print the probability threshold for the second class, and the metrics at that threshold."""
    from vafl.models.metrics import as_text

    measured = next((part for part in ("test", "validation") if decision[part]), "")
    at = f"f1 (at {decision['threshold']:.4g})"  # the metric called "f1" uses 0.5
    names = {"precision": "precision", "recall": "recall", at: "f1"}
    shown = {label: decision[measured][name] for label, name in names.items()} if measured else {}
    where = f"; {measured} rows: {as_text(shown)}" if measured else ""
    console.print(
        f"decision: {decision['positive']} if its probability is at least {decision['threshold']:.4g}, for "
        f"the goal {decision['goal']}{where}"
    )
    if not decision["reached"]:
        console.print(
            "warning: no threshold reaches that goal on the validation rows; the closest one is used (see "
            "`decision` in summary.json)",
            style="yellow",
        )


def _demo(options: argparse.Namespace, console: "Console") -> None:
    from vafl.commands.demo import demo

    demo(options.out, console)


def _run(options: argparse.Namespace, console: "Console") -> None:
    from vafl.run.launch import launch

    out = _folder(options, last=options.overwrite)
    config, earlier = _config(options), options.earlier
    _report(launch(config, out, console, overwrite=options.overwrite, earlier=earlier), console)


def _folder(options: argparse.Namespace, *, last: bool) -> Path:
    """Return --out, or the first free one of runs/NAME, runs/NAME-2, ...; with `last`, the one before it."""
    if options.out:
        return Path(options.out)
    name, number = options.config.stem, 1
    taken = free = Path("runs", name)
    while free.exists():
        number += 1
        taken, free = free, Path("runs", f"{name}-{number}")
    return taken if last else free


def _compare(options: argparse.Namespace, console: "Console") -> None:
    from vafl.observe.compare import (
        baseline_lines,
        by_common_metric,
        common_target,
        compare,
        distinctly_named,
        table,
    )
    from vafl.observe.plots import plot_runs
    from vafl.observe.record import read_run

    runs = by_common_metric(distinctly_named([read_run(path) for path in options.runs]), options.metric)
    metric = runs[0].metric
    target = common_target(runs) if options.target is None else options.target
    lines = compare(runs, target)
    stem = options.out or Path("comparison")
    stem.parent.mkdir(parents=True, exist_ok=True)
    plots = plot_runs(runs, stem)
    if options.json:
        sys.stdout.write(
            json.dumps({"metric": metric, "target": target, "runs": list(map(asdict, lines))}, indent=2)
            + "\n"
        )
    else:
        console.print(table(lines, metric, target))
        for line in baseline_lines(lines, metric):
            console.print(line)
        console.print(f"plots: {', '.join(map(str, plots))}")
        if len(data := sorted({run.summary.get("data", "") for run in runs} - {""})) > 1:
            console.print(f"warning: these runs use different data: {', '.join(data)}", style="yellow")


if __name__ == "__main__":
    sys.exit(main())
