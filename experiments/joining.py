"""Does a party that joins a trained federation make its predictions better at once?

python -m experiments.joining --data FOLDER [--out DIR] [--quick]. Adult, as tables of three companies that
train first. Then a fourth one, which holds the capital gains and losses, joins them (`--from`). Compared on
the same test people: before it joined, at the start of the new run, after a tenth of the original updates,
after as many, and a run that starts anew with all four for a tenth of the updates.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.absent_records import write_tables
from experiments.jobs import in_groups, one_thread, run_all
from experiments.people import People, adult
from experiments.results import Verdict, arguments, publish
from vafl.config import Config, from_document
from vafl.models.decisions import Decision
from vafl.run.assembly import Run, build
from vafl.run.continued import EarlierRun
from vafl.run.model_store import keep_all

NEW = "fund"
SHARE = 0.9  # share of the people that each company but the first knows
UPDATES, TENTH = 4000, 10
LOGISTIC = {
    "embedding": {"model": "linear"},
    "data": {"test_fraction": 0.2, "validation_fraction": 0.1},
    "schedule": {"batch_size": 64},
    "optimiser": {"name": "sgd", "step_size": 0.1},
}
HEADS: dict[str, dict[str, Any]] = {
    "tabular": {},  # what vafl chooses for tables
    "gated": {"model": {"head": "gated"}},
    "logistic": {**LOGISTIC, "model": {"head": "bias", "combine": "sum"}},
}
BEFORE, START, AFTER, END = "before", "at the start", "after a tenth", "after as many"
ANEW = "anew, a tenth"
WAYS = (BEFORE, START, AFTER, END, ANEW)
METRICS = {"auc": 1, "log_loss": -1}  # 1 if more is better
ROUNDING = 1e-3  # of a metric; a new party's embeddings in a sum start near 0, not at 0


@dataclass(frozen=True)
class Trial:
    """One kind of head, and one way to divide the people among training and test rows."""

    head: str
    seed: int
    folder: Path
    out: Path
    updates: int


def attempt(trial: Trial) -> dict[str, float]:
    """Run all ways on Adult."""
    return measure(trial, adult(trial.folder))


def measure(trial: Trial, people: People) -> dict[str, float]:
    """Return "WAY METRIC" -> its value on the test people."""
    folder = trial.out / f"{trial.head}-{trial.seed}"
    tables = write_tables(_with_a_fund(people), trial.seed, folder, SHARE)
    first = [name for name in tables if name not in ("server", NEW)]
    tenth, earlier = trial.updates // TENTH, folder / "three"
    found = {}

    def note(way: str, run: Run) -> None:
        figures = run.evaluator.test() or {}
        found.update({f"{way} {metric}": figures[metric] or 0.0 for metric in METRICS})

    def trained(clients: Sequence[str], updates: int, *, continues: bool) -> Run:
        config = _config(trial, tables, clients, updates)
        run = build(config, beginning=EarlierRun(earlier, config) if continues else None)
        if continues and updates == tenth:
            note(START, run)
        run.train()
        return run

    with one_thread():
        run = trained(first, trial.updates, continues=False)
        note(BEFORE, run)
        keep_all(run, Decision(), earlier)
        note(AFTER, trained([*first, NEW], tenth, continues=True))
        note(END, trained([*first, NEW], trial.updates, continues=True))
        note(ANEW, trained([*first, NEW], tenth, continues=False))
    return found


def _with_a_fund(people: People) -> People:
    """Return the table with the capital gains and losses at a company of their own."""
    held = {"capital-gain", "capital-loss"}
    others = {
        name: [column for column in columns if column not in held] for name, columns in people.columns.items()
    }
    return People(people.known, people.new, {**others, NEW: sorted(held)}, people.categories)


def _config(trial: Trial, tables: Mapping[str, Any], clients: Sequence[str], updates: int) -> Config:
    own = HEADS[trial.head]
    data = {"name": "parties", "parties": list(clients), "records": "labelled", **own.get("data", {})}
    stop = {"updates": updates, "patience": 0}  # without it, the models after exactly these updates count
    sources = {name: {"source": tables[name]} for name in ("server", *clients)}
    sections = {"seed": trial.seed, "stop": stop, "evaluation": {"every": updates}, "parties": sources}
    return from_document({**own, **sections, "data": data})


def main(options: Sequence[str]) -> int:
    parser = arguments("joining", "Does a party that joins make predictions better at once?")
    chosen = parser.parse_args(options)
    if chosen.data is None:
        parser.error("--data must name the folder that holds adult/")
    chosen.out.mkdir(parents=True, exist_ok=True)
    seeds = (0,) if chosen.quick else (0, 1, 2)
    updates = 500 if chosen.quick else UPDATES
    trials = [
        Trial(head, seed, chosen.data, chosen.out / "runs", updates) for head in HEADS for seed in seeds
    ]
    found = run_all("training", attempt, trials, workers=chosen.workers)
    means = [{key: mean(each[key] for each in own) for key in own[0]} for own in in_groups(found, len(seeds))]
    measured = dict(zip(HEADS, means, strict=True))
    return publish(chosen.out, chosen.quick, measured, _verdicts(measured))


def _verdicts(measured: Mapping[str, Mapping[str, float]]) -> list[Verdict]:
    verdicts = []
    for head, figures in measured.items():
        for metric, sign in METRICS.items():
            values = {way: figures[f"{way} {metric}"] for way in WAYS}
            text = ", ".join(f"{way} {value:.4f}" for way, value in values.items())
            same = abs(values[START] - values[BEFORE]) <= ROUNDING
            verdicts.append(Verdict(f"{head}: {metric} at the start", text, "as before", same))
            gain = sign * (values[AFTER] - values[BEFORE])
            verdicts.append(
                Verdict(f"{head}: {metric} after a tenth", f"{gain:+.4f}", "0 or more", gain >= 0)
            )
    return verdicts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
