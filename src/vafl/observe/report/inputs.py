"""What a report is made from: the files of a finished run, read and checked."""

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from vafl.errors import RunFolderError
from vafl.observe.record import IMPORTANCE, SCORES, SUMMARY, RecordedRun, read_run
from vafl.observe.report.statistics import Floats


@dataclass(frozen=True)
class Scores:
    """The model's scores of one part of the held-out rows.

    Attributes:
        part: "test" or "validation".
        scores: [rows], the probability of the second of two classes, or predicted numbers; of several classes
            [rows, classes].
        labels: [rows], the places of the classes in `classes`, or numbers.
        classes: Names; empty for numbers.
    """

    part: str
    scores: Floats
    labels: Floats
    classes: Sequence[str]

    @property
    def rows(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Influence:
    """What permuting a party's data, or one of its columns, does to the model.

    Attributes:
        loss: By how much the loss rises.
        deviation: The standard deviation of `loss` over the repetitions.
        drop: By how much the headline metric becomes worse; None if it was not measured.
    """

    loss: float
    deviation: float
    drop: float | None


@dataclass(frozen=True)
class Importance:
    """importance.json, as `vafl importance` writes it.

    Attributes:
        rows: The number of held-out rows it was measured on.
        parties: By party.
        columns: By party and column, where the party allows it.
    """

    rows: int
    parties: Mapping[str, Influence]
    columns: Mapping[str, Mapping[str, Influence]]


@dataclass(frozen=True)
class Inputs:
    """Everything that a report says.

    Attributes:
        settings: config.toml as it is.
        digest: Of config.toml.
        ended: When the run ended.
        scores, importance: None if the run folder has no such file.
        accounts: What the privacy ledgers on this machine say, one a party.
    """

    run: RecordedRun
    settings: Mapping[str, Any]
    digest: str
    ended: datetime
    scores: Scores | None
    importance: Importance | None
    accounts: Sequence[Mapping[str, Any]]

    @property
    def part(self) -> str:
        """The held-out rows that the report is about: "test", or "validation" if there are no others."""
        if self.scores is not None:
            return self.scores.part
        return "test" if self.run.kept("test") else "validation"


def read_inputs(folder: Path, accounts: Sequence[Mapping[str, Any]] = ()) -> Inputs:
    """Read the folder of a finished run.

    Raises:
        RunFolderError: The run has not ended, or a file is damaged.
    """
    run = read_run(folder)
    try:
        content = (folder / "config.toml").read_bytes()
        settings = tomllib.loads(content.decode())
        return Inputs(
            run,
            settings,
            hashlib.sha256(content).hexdigest()[:16],
            datetime.fromtimestamp((folder / SUMMARY).stat().st_mtime, UTC),
            _read_scores(folder / SCORES, run.summary["classes"]),
            _read_importance(folder / IMPORTANCE),
            accounts,
        )
    except (KeyError, TypeError, ValueError, AttributeError, pl.exceptions.PolarsError) as error:
        raise RunFolderError(
            f'a report needs the files of a run as vafl writes them. One in "{folder}" is damaged: '
            f"{error!r}. Restore it, or run again; the figures are in {SUMMARY}."
        ) from error


def _read_scores(path: Path, classes: Sequence[str]) -> Scores | None:
    if not path.is_file():
        return None
    table = pl.read_parquet(path)
    part = "test" if (table["part"] == "test").any() else "validation"
    table = table.filter(pl.col("part") == part)
    if table.is_empty():
        return None
    if classes:
        places = {name: place for place, name in enumerate(classes)}
        labels = table["label"].cast(pl.String).replace_strict(places, return_dtype=pl.Float64)
    else:
        labels = table["label"].cast(pl.Float64)
    columns = ["score"] if len(classes) <= 2 else [f"score_{place}" for place in range(len(classes))]
    scores = table.select(pl.col(columns).cast(pl.Float64)).to_numpy()
    if not np.isfinite(scores).all():
        raise ValueError(f"{SCORES} has scores that are no finite numbers")
    return Scores(part, scores[:, 0] if len(columns) == 1 else scores, labels.to_numpy(), classes)


def _read_importance(path: Path) -> Importance | None:
    if not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    return Importance(
        int(document["rows"]),
        _influences(document["parties"]),
        {party: _influences(own) for party, own in document.get("features", {}).items()},
    )


def _influences(document: Mapping[str, Mapping[str, Any]]) -> dict[str, Influence]:
    return {
        name: Influence(
            float(own["loss_increase"]),
            float(own.get("sd") or 0.0),
            None if own.get("headline_drop") is None else float(own["headline_drop"]),
        )
        for name, own in document.items()
    }
