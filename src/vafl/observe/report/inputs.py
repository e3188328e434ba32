"""Read and check the files of a finished run for its report."""

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from vafl.arrays import Doubles
from vafl.errors import RunFolderError
from vafl.models.store import MANIFEST
from vafl.observe.record import IMPORTANCE, SCORES, SUMMARY, RecordedRun, read_run


@dataclass(frozen=True)
class Scores:
    """The model's scores on one part of the held-out rows.

    Attributes:
        part: "test" or "validation".
        scores: The probability of the second of two classes, or the predicted number, [rows]; for more than
            two classes the probability of each, [rows, classes].
        labels: Indices into `classes`, or numbers, [rows].
        classes: The class names; empty for numbers.
        alone: The scores of the baseline "label holder alone" on the same rows; None if there is none.
    """

    part: str
    scores: Doubles
    labels: Doubles
    classes: Sequence[str]
    alone: Doubles | None = None

    @property
    def rows(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Influence:
    """The effect of permuting a party's data, or one of its columns, on the model.

    Attributes:
        loss: The increase of the loss.
        deviation: The standard deviation of `loss` over the repeats.
        drop: The drop in quality by the headline metric; None if it was not measured.
    """

    loss: float
    deviation: float
    drop: float | None


@dataclass(frozen=True)
class Importance:
    """importance.json, as `vafl importance` writes it.

    Attributes:
        rows: The number of held-out rows that were measured.
        parties: Party -> the influence of all its data.
        columns: Party -> column -> its influence, if the party allows it.
        refused: Party -> the reason why something was not measured.
    """

    rows: int
    parties: Mapping[str, Influence]
    columns: Mapping[str, Mapping[str, Influence]]
    refused: Mapping[str, str]


@dataclass(frozen=True)
class Inputs:
    """The data of a report.

    Attributes:
        run: The finished run.
        settings: The content of config.toml.
        digest: The start of the SHA-256 digest of config.toml.
        columns: Party -> the number of columns it uses; None if this machine does not know it.
        ended: When the run ended.
        scores, importance: None if the run folder has no such file.
        accounts: The statements of the privacy ledgers on this machine, one per party.
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
        """The held-out rows that the report covers: "test", or "validation" if there are no test rows."""
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
            f'a report needs intact files of a finished run. One in "{folder}" is damaged: {error!r}. '
            f"Restore it, or run again. The metrics are also in {SUMMARY}.",
        ) from error


def _columns(folder: Path, party: str, known: int | None) -> int | None:
    """Return how many columns a party uses, or how many numbers a record has without columns.

    A server does not learn that of its clients. If all parties run on one machine, it is in the manifests of
    their models. None if it is unknown.
    """
    manifest = folder / "models" / party / MANIFEST
    if known is not None or not manifest.is_file():
        return known
    described = tomllib.loads(manifest.read_text(encoding="utf-8"))
    schema = described["schema"]
    if schema.get("kind") == "table":
        return len(schema["columns"])
    return int(math.prod(described["features"]) - bool(schema.get("flags_absent")))


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
    scores = _score_columns(table, columns)
    if scores is None:
        raise ValueError(f"{SCORES} has scores that are not finite")
    alone_columns = [f"alone_{name}" for name in columns]
    alone = _score_columns(table, alone_columns) if set(alone_columns) <= set(table.columns) else None
    return Scores(part, scores, labels.to_numpy(), classes, alone)


def _score_columns(table: pl.DataFrame, columns: Sequence[str]) -> Doubles | None:
    """Return the scores, [rows] or [rows, classes]; None if any is missing or not finite."""
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
        {party: _influences(columns) for party, columns in document.get("features", {}).items()},
        {party: str(why) for party, why in document.get("refused", {}).items()},
    )


def _influences(document: Mapping[str, Mapping[str, Any]]) -> dict[str, Influence]:
    return {
        name: Influence(
            float(entry["loss_increase"]),
            float(entry.get("sd") or 0.0),
            None if entry.get("headline_drop") is None else float(entry["headline_drop"]),
        )
        for name, entry in document.items()
    }
