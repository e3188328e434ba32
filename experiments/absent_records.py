"""Three companies' tables, where the others know half of the label holder's people each.

python -m experiments.absent_records --data FOLDER [--out DIR] [--quick]. The label holder has features of all
its people. Compared on the same test people: the label holder alone, the federation on the common people, the
federation on all of the label holder's people, and the same model trained on the pooled tables.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from experiments.jobs import in_groups, one_thread, run_all
from experiments.people import SOURCES, People
from experiments.results import Verdict, arguments, publish
from vafl.config import Config, from_document, read_document
from vafl.data.partition import Party, VerticalData
from vafl.data.split import Parts
from vafl.run.assembly import Run, build
from vafl.run.plan import make_plan

TOML = Path(__file__).with_suffix(".toml")
KNOWN = 0.5  # share of people that each other company knows
CLOSE = 0.01  # of the area under the ROC curve
ALONE, COMMON, LABELLED, POOLED = "label holder alone", "federated, common people", "federated", "pooled"
WAYS = (ALONE, COMMON, LABELLED, POOLED)


def write_tables(people: People, seed: int, out: Path, known: float = KNOWN) -> dict[str, Any]:
    """Write each company's CSV in its own random order; return the [parties.NAME.source] sections.

    Args:
        known: the share of the people that each company but the first knows.
    """
    generator, whole = np.random.default_rng(seed), pl.concat([people.known, people.new])
    whole = whole.with_columns(person=pl.Series(f"P{n:07d}" for n in generator.permutation(whole.height)))
    out.mkdir(parents=True, exist_ok=True)
    sections: dict[str, Any] = {}
    holder = next(iter(people.columns))
    for party, columns in {"server": ["label"], **people.columns}.items():
        share = 1.0 if party in ("server", holder) else known
        lines = generator.permutation(whole.height)[: round(share * whole.height)]
        whole[lines].select("person", *columns).write_csv(out / f"{party}.csv")
        sections[party] = {"path": str(out / f"{party}.csv"), "id": "person"}
        categories = [column for column in columns if column in people.categories]
        sections[party] |= {"label": "label"} if party == "server" else {"categories": categories}
    return sections


@dataclass(frozen=True)
class Trial:
    """One way to train on one set of companies."""

    source: str
    way: str
    seed: int
    folder: Path
    out: Path
    quick: bool


def attempt(trial: Trial) -> dict[str, float]:
    """Train on the public table as the companies would hold it."""
    return measure(trial, SOURCES[trial.source](trial.folder))


def measure(trial: Trial, people: People) -> dict[str, float]:
    """Train, and measure on all test people, and on those that every company knows."""
    files = trial.out / f"{trial.source}-{trial.seed}-{trial.way.replace(' ', '-')}"
    config = _config(trial, write_tables(people, trial.seed, files))
    with one_thread():
        data = make_plan(config).data
        common = _known_to_all(data)
        if trial.way == ALONE:
            data = replace(data, parties=data.parties[:1])
        if trial.way == COMMON:
            data = _only(_without_flags(data), common)
        run = build(config, data)
        points = run.train()
        tests = common[len(common) - _tests(data) :]
        everyone = torch.ones_like(tests)
        return {
            "auc": _measure(run, everyone),
            "auc_common": _measure(run, tests),
            "test_people": len(tests),
            "updates": points[-1].updates,
        }


def _config(trial: Trial, tables: dict[str, Any]) -> Config:
    parties = [name for name in tables if name != "server"]
    rule = "async" if trial.way in (COMMON, LABELLED) else "centralised"
    quick = ["stop.updates=500"] if trial.quick else []
    document = read_document(TOML, [f"seed={trial.seed}", f"rule.name={rule}", *quick])
    document["data"] |= {"parties": parties, "records": "labelled"}
    sources = {name: {"source": source} for name, source in tables.items()}
    return from_document({**document, "parties": sources})


def _tests(data: VerticalData) -> int:
    return data.parts.test


def _known_to_all(data: VerticalData) -> Tensor:
    """Return for each row, training rows first, whether every company knows the person: [rows]."""
    return torch.stack([own.features[:, -1] == 0 for own in data.parties]).all(0)


def _without_flags(data: VerticalData) -> VerticalData:
    """Return the data as without "labelled": absent people have zeros (the means) and no indicator."""
    parties = [Party(own.name, own.features[:, :-1]) for own in data.parties]
    return replace(data, parties=tuple(parties))


def _only(data: VerticalData, rows: Tensor) -> VerticalData:
    """Return the data with only these training and validation rows, and all test rows."""
    kept = rows.clone()
    kept[data.test] = True
    parties = [Party(own.name, own.features[kept]) for own in data.parties]
    return replace(
        data,
        parties=tuple(parties),
        labels=data.labels[kept],
        parts=Parts(int(rows[data.train].sum()), int(rows[data.validation].sum()), data.parts.test),
        records=None,
    )


def _measure(run: Run, chosen: Tensor) -> float:
    """Return the metric on the chosen test rows."""
    tests = run.data.test
    features = [own.features[tests][chosen] for own in run.data.parties]
    outputs, labels = run.evaluator.outputs(features), run.data.labels[tests][chosen]
    return run.task.metrics.headline.measure(outputs, labels) or 0.0


def main(options: Sequence[str]) -> int:
    parser = arguments("absent_records", "What if the others know half of the label holder's people each?")
    parser.set_defaults(workers=1)
    chosen = parser.parse_args(options)
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.data is None:
        parser.error("--data must name the folder that holds adult/ and credit_default/")
    seeds = (0,) if chosen.quick else (0, 1, 2)
    trials = [
        Trial(source, way, seed, chosen.data, chosen.out / "tables", chosen.quick)
        for source in SOURCES
        for way in WAYS
        for seed in seeds
    ]
    found = run_all("training", attempt, trials, workers=chosen.workers)
    means = [_means(results) for results in in_groups(found, len(seeds))]
    measured = {
        source: dict(zip(WAYS, own, strict=True))
        for source, own in zip(SOURCES, in_groups(means, len(WAYS)), strict=True)
    }
    return publish(chosen.out, chosen.quick, measured, _verdicts(measured))


def _means(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each figure over the seeds."""
    return {key: mean(each[key] for each in results) for key in results[0]}


def _verdicts(measured: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[Verdict]:
    verdicts = []
    for source, by_way in measured.items():
        figures = {way: found["auc"] for way, found in by_way.items()}
        text = ", ".join(f"{way} {value:.4f}" for way, value in figures.items())
        close = figures[POOLED] - figures[LABELLED] <= CLOSE
        verdicts.append(Verdict(f"{source}: as good as pooled", text, f"within {CLOSE}", close))
        gain = figures[LABELLED] - max(figures[ALONE], figures[COMMON])
        verdicts.append(Verdict(f"{source}: better than less data", f"{gain:+.4f}", "above 0", gain > 0))
    return verdicts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
