"""What is a federation worth to whoever holds the labels? Three companies' tables, with people in common.

The label holder has columns of its own, on all its people; each other company knows some of them. On the
same test people: the label holder alone, the federation on the people that all have, the federation on all
of the label holder's, and the same model trained on the pooled tables.
"""

import gzip
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

from experiments.jobs import one_thread, run_all
from experiments.results import Verdict, arguments, publish
from vafl.build import Run, build, make_plan
from vafl.config import Config, from_document, read_document
from vafl.data.partition import Party, VerticalData

TOML = Path(__file__).with_suffix(".toml")
OVERLAPS = (1.0, 0.5)  # the share of people that each other company knows
CLOSE = 0.01  # of the area under the ROC curve

_ADULT = [
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country"),
    "income",
]


@dataclass(frozen=True)
class Source:
    """A public table and who holds which of its columns; the first company holds the labels too."""

    title: str
    label: str
    columns: Mapping[str, Sequence[str]]
    categories: Sequence[str] = ()


SOURCES = {
    "adult": Source(
        "Adult",
        "income",
        {
            "bank": ("age", "education", "education-num", "workclass", "race", "sex"),
            "register": ("marital-status", "relationship", "native-country"),
            "tax": ("occupation", "capital-gain", "capital-loss", "hours-per-week"),
        },
    ),
    "credit_default": Source(
        "credit default",
        "default.payment.next.month",
        {
            "bank": ("LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE"),
            "bureau": ("PAY_0", "PAY_2", "PAY_3", "PAY_4", "PAY_5", "PAY_6"),
            "shop": tuple(f"{kind}_AMT{month}" for kind in ("BILL", "PAY") for month in range(1, 7)),
        },
        ("SEX", "EDUCATION", "MARRIAGE"),
    ),
}


def read_source(name: str, folder: Path) -> pl.DataFrame:
    """The public table as one, all columns as text."""
    if name == "credit_default":
        return pl.read_csv(folder / name / "UCI_Credit_Card.csv.gz", infer_schema=False)
    lines: list[str] = []
    for file, skipped in (("adult.data.gz", 0), ("adult.test.gz", 1)):
        text = gzip.decompress((folder / name / file).read_bytes()).decode()
        lines += [line.rstrip(".") for line in text.splitlines()[skipped:] if line]
    return pl.read_csv(
        "\n".join(lines).encode(), has_header=False, new_columns=_ADULT, infer_schema=False
    ).select(pl.all().str.strip_chars())


def write_tables(name: str, whole: pl.DataFrame, overlap: float, seed: int, out: Path) -> dict[str, Any]:
    """Each company's CSV, its people in an order of its own; gives their [tables.NAME] sections."""
    source, generator = SOURCES[name], np.random.default_rng(seed)
    whole = whole.with_columns(person=pl.Series(f"P{n:07d}" for n in generator.permutation(whole.height)))
    out.mkdir(parents=True, exist_ok=True)
    sections: dict[str, Any] = {}
    holder = next(iter(source.columns))
    for party, columns in {"server": (source.label,), **source.columns}.items():
        share = 1.0 if party in ("server", holder) else overlap
        known = generator.permutation(whole.height)[: round(share * whole.height)]
        whole[known].select("person", *columns).write_csv(out / f"{party}.csv")
        sections[party] = {"path": str(out / f"{party}.csv"), "id": "person"}
        categories = [column for column in columns if column in source.categories]
        sections[party] |= {"label": source.label} if party == "server" else {"categories": categories}
    return sections


@dataclass(frozen=True)
class Trial:
    """One way to train on one set of companies."""

    source: str
    overlap: float
    way: str
    seed: int
    folder: str
    out: str
    quick: bool


def ways(overlap: float) -> tuple[str, ...]:
    """How there is to train: on the people in common only where not all are."""
    partial = () if overlap == 1 else ("federated, common people",)
    return ("label holder alone", *partial, "federated", "pooled")


def attempt(trial: Trial) -> dict[str, float]:
    """Trains, and measures on the test people: all of them, and those that every company knows."""
    whole = read_source(trial.source, Path(trial.folder))
    whole = whole.head(2000) if trial.quick else whole
    files = Path(trial.out) / f"{trial.source}-{trial.overlap}-{trial.seed}-{trial.way.replace(' ', '-')}"
    config = _config(trial, write_tables(trial.source, whole, trial.overlap, trial.seed, files))
    with one_thread():
        data = make_plan(config).data
        common = _known_to_all(data)
        if trial.way == "label holder alone":
            data = replace(data, parties=data.parties[:1])
        if trial.way == "federated, common people":
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
    rule = "async" if trial.way.startswith("federated") else "centralised"
    quick = ["stop.updates=500"] if trial.quick else []
    document = read_document(TOML, [f"seed={trial.seed}", f"rule.name={rule}", *quick])
    document["data"] |= {"parties": parties, "records": "labelled"}
    return from_document({**document, "tables": tables})


def _tests(data: VerticalData) -> int:
    return len(data.test_labels) - data.validation


def _known_to_all(data: VerticalData) -> Tensor:
    """[rows], training rows first: whether no company lacks the person."""
    return torch.stack([torch.cat([own.train, own.test])[:, -1] == 0 for own in data.parties]).all(0)


def _without_flags(data: VerticalData) -> VerticalData:
    """As without "labelled": nothing says who is lacking, and zeros (the means) stand in for them."""
    parties = [Party(own.name, own.train[:, :-1], own.test[:, :-1]) for own in data.parties]
    return replace(data, parties=tuple(parties))


def _only(data: VerticalData, rows: Tensor) -> VerticalData:
    """The training and validation rows among these; the test rows stay."""
    trained, held_out = rows[: data.rows], rows[data.rows :].clone()
    held_out[data.validation :] = True
    parties = [Party(own.name, own.train[trained], own.test[held_out]) for own in data.parties]
    return replace(
        data,
        parties=tuple(parties),
        train_labels=data.train_labels[trained],
        test_labels=data.test_labels[held_out],
        records=None,
        validation=int(rows[data.rows : data.rows + data.validation].sum()),
    )


def _measure(run: Run, chosen: Tensor) -> float:
    """The metric on those of the test rows that are chosen."""
    tests = _tests(run.data)
    features = [own.test[-tests:][chosen] for own in run.data.parties]
    return run.task.metric.measure(run.evaluator.outputs(features), run.data.test_labels[-tests:][chosen])


def main(options: Sequence[str]) -> int:
    parser = arguments("companies", "What a federation is worth to whoever holds the labels.")
    parser.set_defaults(workers=1)
    chosen = parser.parse_args(options)
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.data is None:
        parser.error("--data must name the folder that holds adult/ and credit_default/")
    seeds = (0,) if chosen.quick else (0, 1, 2)
    trials = [
        Trial(source, overlap, way, seed, str(chosen.data), str(chosen.out / "tables"), chosen.quick)
        for source in SOURCES
        for overlap in OVERLAPS
        for way in ways(overlap)
        for seed in seeds
    ]
    found = dict(zip(trials, run_all("training", attempt, trials, workers=chosen.workers), strict=True))
    measured = {
        source: {str(overlap): _means(source, overlap, found) for overlap in OVERLAPS} for source in SOURCES
    }
    return publish(chosen.out, chosen.quick, measured, _verdicts(measured))


def _means(source: str, overlap: float, found: Mapping[Trial, Mapping[str, float]]) -> dict[str, Any]:
    """Way -> the mean of each figure over the seeds."""
    own = {
        way: [
            result
            for trial, result in found.items()
            if (trial.source, trial.overlap, trial.way) == (source, overlap, way)
        ]
        for way in ways(overlap)
    }
    return {
        way: {key: mean(each[key] for each in results) for key in results[0]} for way, results in own.items()
    }


def _verdicts(measured: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    verdicts = []
    for source, by_overlap in measured.items():
        for overlap, by_way in by_overlap.items():
            figures = {way: by_way[way]["auc"] for way in by_way}
            text = ", ".join(f"{way} {value:.4f}" for way, value in figures.items())
            title = f"{SOURCES[source].title}, {float(overlap):.0%} known to the others"
            gap = figures["pooled"] - figures["federated"]
            verdicts.append(Verdict(f"{title}: as good as pooled", text, f"within {CLOSE}", gap <= CLOSE))
            lesser = [value for way, value in figures.items() if way not in ("federated", "pooled")]
            better = figures["federated"] > max(lesser)
            gain = f"{figures['federated'] - max(lesser):+.4f}"
            verdicts.append(Verdict(f"{title}: better than less data", gain, "above 0", better))
    return verdicts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
