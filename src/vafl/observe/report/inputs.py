"""Read and check the files of a finished run that a report is made from."""

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
from vafl.models.store import MANIFEST
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
        alone: The scores of the baseline "label holder alone" on the same rows; None if there is none.
    """

    part: str
    scores: Floats
    labels: Floats
    classes: Sequence[str]
    alone: Floats | None = None

    @property
    def rows(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Influence:
    """The effect of permuting a party's data, or one of its columns, on the model.

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
        refused: By party, why something was not measured.
    """

    rows: int
    parties: Mapping[str, Influence]
    columns: Mapping[str, Mapping[str, Influence]]
    refused: Mapping[str, str]


@dataclass(frozen=True)
class Inputs:
    """Everything that a report says.

    Attributes:
        settings: config.toml as it is.
        digest: Of config.toml.
        columns: How many columns each party uses; None if that is not known here.
        ended: When the run ended.
        scores, importance: None if the run folder has no such file.
        accounts: What the privacy ledgers on this machine say, one a party.
    """

    run: RecordedRun
    settings: Mapping[str, Any]
    digest: str
    columns: Mapping[str, int | None]
    ended: datetime
    scores: Scores | None
    importance: Importance | None
    accounts: Sequence[Mapping[str, Any]]

    @property
    def part(self) -> str:
        """The held-out rows that the report is about: "test", or "validation" if there are no test rows."""
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
            {party: _columns(folder, party, known) for party, known in run.summary["columns"].items()},
            datetime.fromtimestamp((folder / SUMMARY).stat().st_mtime, UTC),
            _read_scores(folder / SCORES, run.summary["classes"]),
            _read_importance(folder / IMPORTANCE),
            accounts,
        )
    except (KeyError, TypeError, ValueError, AttributeError, pl.exceptions.PolarsError) as error:
        raise RunFolderError(
            "VFL-8031",
            f'a report needs the files of a run as vafl writes them. One in "{folder}" is damaged: '
            f"{error!r}. Restore it, or run again; the figures are in {SUMMARY}.",
        ) from error


def _columns(folder: Path, party: str, known: int | None) -> int | None:
    """Return how many columns a party uses, by its model if that is in the run folder too.

    A server does not learn how many columns its clients use. If all parties run on one machine, the manifests
    of their models say it.
    """
    manifest = folder / "models" / party / MANIFEST
    if known is not None or not manifest.is_file():
        return known
    return len(tomllib.loads(manifest.read_text(encoding="utf-8"))["schema"]["columns"])


def _read_scores(path: Path, classes: Sequence[str]) -> Scores | None:
    if not path.is_file():
        return None
    table = pl.read_parquet(path, glob=False)
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
    own = _score_columns(table, columns)
    if own is None:
        raise ValueError(f"{SCORES} has scores that are not finite")
    beside = [f"alone_{name}" for name in columns]
    alone = _score_columns(table, beside) if set(beside) <= set(table.columns) else None
    return Scores(part, own, labels.to_numpy(), classes, alone)


def _score_columns(table: pl.DataFrame, columns: Sequence[str]) -> Floats | None:
    """Return scores [rows], or [rows, classes] of several classes; None if any is missing or not finite."""
    scores = table.select(pl.col(columns).cast(pl.Float64)).to_numpy()
    if not np.isfinite(scores).all():
        return None
    return scores[:, 0] if len(columns) == 1 else scores


def _read_importance(path: Path) -> Importance | None:
    if not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    return Importance(
        int(document["rows"]),
        _influences(document["parties"]),
        {party: _influences(own) for party, own in document.get("features", {}).items()},
        {party: str(why) for party, why in document.get("refused", {}).items()},
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
