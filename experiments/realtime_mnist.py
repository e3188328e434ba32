"""Compare the wall-clock time of async and sync training between real processes.

    python -m experiments.realtime_mnist --data DIR [--out DIR] [--quick] [--seeds N]

DIR holds mnist/ with the four original files. `vafl up` starts a server and seven clients that talk over
mutual TLS on loopback and sleep between their activations as in the paper: Poisson(2m)/14 seconds for
client m. Each rule uses about its best step size in the simulator, and stops when it has reached the target
accuracy on the test rows. The clock starts when all clients have joined.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from experiments import figures
from experiments.results import Verdict, arguments, publish
from vafl.config import read_config
from vafl.errors import VaflError
from vafl.observe.record import RecordedRun
from vafl.run.up import up

SHARE = 0.5  # share of sync's time that async may take


@dataclass(frozen=True)
class Rule:
    name: str
    step_size: float
    colour: str


ASYNC, SYNC = Rule("async", 2.0, figures.BLUE), Rule("sync", 0.6, figures.BLACK)


@dataclass(frozen=True)
class Scale:
    """The size of the experiment.

    Attributes:
        changes: changes to the configuration, as `--set` takes them.
    """

    seeds: int
    target: float
    changes: tuple[str, ...] = ()


FULL = Scale(3, 0.88)
QUICK = Scale(
    1,
    0.70,
    (
        "partition.clients=3",
        "schedule.batch_size=60",
        "delays.unit=0.2",
        "evaluation.every_seconds=0.1",
        "stop.seconds=60",
    ),
)


def race(rule: Rule, seed: int, scale: Scale, folder: str, out: Path) -> RecordedRun:
    """Run a federation of real processes until it has reached the target."""
    config = read_config(
        Path(__file__).with_suffix(".toml"),
        [
            f"rule.name={rule.name}",
            f"optimiser.step_size={rule.step_size}",
            f"seed={seed}",
            f"stop.metric={scale.target}",
            *([f'data.folder="{folder}"'] if folder else []),
            *scale.changes,
        ],
    )
    return up(config, out / f"{rule.name}-{seed}", Console(), overwrite=True)


def seconds_to(run: RecordedRun, target: float) -> float:
    """Return the seconds to the target, or those of the whole run if it never reached the target."""
    reached = run.first_reaching(target)
    return (reached or run.evaluations[-1]).seconds


def report(
    out: Path, quick: bool, scale: Scale, asynchronous: list[RecordedRun], synchronous: list[RecordedRun]
) -> int:
    pairs = zip(asynchronous, synchronous, strict=True)
    shares = [seconds_to(one, scale.target) / seconds_to(other, scale.target) for one, other in pairs]
    reached = all(run.first_reaching(scale.target) for run in asynchronous)
    share = median(shares)
    verdict = Verdict(
        claim=f"async reaches {scale.target} in at most half of sync's wall-clock time",
        measured=f"{share:.2f} of it (median of {len(shares)} seeds)",
        target=f"at most {SHARE}",
        holds=reached and share <= SHARE,
    )
    draw(out / "realtime_mnist", scale.target, ((ASYNC, asynchronous), (SYNC, synchronous)))
    measured: dict[str, Any] = {
        "target": scale.target,
        "share": shares,
        **{
            rule.name: {
                "step_size": rule.step_size,
                "seconds": [seconds_to(run, scale.target) for run in runs],
                "updates": [run.evaluations[-1].updates for run in runs],
                "accuracy": [run.evaluations[-1].metric for run in runs],
            }
            for rule, runs in ((ASYNC, asynchronous), (SYNC, synchronous))
        },
    }
    return publish(out, quick, measured, [verdict])


def draw(path: Path, target: float, races: Sequence[tuple[Rule, Sequence[RecordedRun]]]) -> None:
    with figures.drawing(path, panels=1) as (axes,):
        for rule, runs in races:
            for number, run in enumerate(runs):
                seconds = [point.seconds for point, _ in run.measured]
                accuracy = [value for _, value in run.measured]
                label = rule.name if number == 0 else None
                axes.plot(seconds, accuracy, color=rule.colour, label=label, linewidth=1.0)
        axes.axhline(target, color=figures.GREY, linestyle=":", linewidth=0.8)
        axes.set_xlabel("seconds on the wall, seven clients' processes over mutual TLS")
        axes.set_ylabel("test accuracy")
        axes.legend(loc="lower right")


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("realtime_mnist", (__doc__ or "").splitlines()[0], workers=False)
    parser.add_argument("--seeds", type=int, metavar="N", help=f"runs of each rule (default {FULL.seeds})")
    options = parser.parse_args(argv)
    scale = QUICK if options.quick else FULL
    folder = "" if options.data is None else str(options.data.resolve())
    runs: dict[Rule, list[RecordedRun]] = {ASYNC: [], SYNC: []}
    try:
        for seed in range(options.seeds or scale.seeds):
            for rule, made in runs.items():
                made.append(race(rule, seed, scale, folder, options.out))
    except VaflError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return error.exit_code
    return report(options.out, options.quick, scale, runs[ASYNC], runs[SYNC])


if __name__ == "__main__":
    sys.exit(main())
