"""Conclude a run: fit calibration and threshold on the validation rows, and measure the kept models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from torch import Tensor

from vafl.arrays import Doubles, Labels
from vafl.config import Config
from vafl.data.partition import VerticalData
from vafl.models.decisions import (
    Decision,
    DecisionSettings,
    Goal,
    Threshold,
    choose_threshold,
    decision_figures,
)
from vafl.models.metrics import Figures, Metrics
from vafl.models.probabilities import Calibration, probabilities
from vafl.run.plan import Task, held_out_labels, loss_weights


@dataclass(frozen=True)
class Conclusion:
    """The results of the kept models on the held-out rows, and how their outputs become predictions.

    The mappings have no entry for a part that was not measured.

    Attributes:
        decision: the calibration and threshold that are stored with the head.
        outputs: part -> the head's calibrated outputs, [rows, outputs].
        figures: part -> every metric of `outputs`.
        calibration: the entry `calibration` of summary.json; None without a calibration.
        threshold: the entry `decision` of summary.json; None unless there are two classes.
        scores: the content of scores.parquet.
    """

    decision: Decision
    outputs: Mapping[str, Doubles]
    figures: Mapping[str, Figures]
    calibration: dict[str, Any] | None
    threshold: dict[str, Any] | None
    scores: pl.DataFrame


def conclude(config: Config, task: Task, data: VerticalData, measured: Mapping[str, Tensor]) -> Conclusion:
    """Fit calibration and threshold, and measure the kept models with them.

    A fit needs validation rows of two classes with finite outputs. If model.calibration or decision.goal
    require a fit, `make_plan` has checked that such rows exist. A fit may still be impossible, for example if
    no client answered for these rows. The effect of class weights is then reversed analytically, and the
    threshold is 0.5.

    Args:
        data: the run's data, with the labels that the run was trained on.
        measured: part -> the kept head's outputs on these rows, [rows, outputs].
    """
    labels = {part: each.numpy() for part, each in held_out_labels(data).items() if part in measured}
    raw = {part: measured[part].double().numpy() for part in labels}
    classes = () if task.loss == "squared" else data.classes or ()
    fitted = bool(classes) and "validation" in raw and _allows_fit(raw["validation"], labels["validation"])
    weights = loss_weights(config, data)
    calibration = Calibration()
    if classes and config.model.calibration != "none":
        calibration = (
            Calibration.fit(config.model.calibration_method, raw["validation"], labels["validation"], weights)
            if fitted
            else Calibration.undoing(weights, task.outputs)
        )
    outputs = {part: calibration(each) for part, each in raw.items()}
    shares = {part: probabilities(each) for part, each in outputs.items()} if classes else {}
    threshold, report = Threshold(), None
    if len(classes) == 2:
        threshold, report = _decide(config.decision, classes, shares, labels, fitted=fitted)
    return Conclusion(
        Decision(calibration, threshold.value),
        outputs,
        _measure(task.metrics, outputs, labels),
        None if calibration.method == "none" else _before_and_after(task.metrics, calibration, raw, labels),
        report,
        _scores(classes, labels, shares or outputs),
    )


def _allows_fit(outputs: Doubles, labels: Labels) -> bool:
    return bool(np.isfinite(outputs).all() and (labels != labels[0]).any())


def _measure(
    metrics: Metrics, outputs: Mapping[str, Doubles], labels: Mapping[str, Labels]
) -> dict[str, Figures]:
    return {part: metrics.measure(each, labels[part]) for part, each in outputs.items()}


def _before_and_after(
    metrics: Metrics,
    calibration: Calibration,
    raw: Mapping[str, Doubles],
    labels: Mapping[str, Labels],
) -> dict[str, Any]:
    """Return log loss and Brier score by part, without and with the calibration."""
    calibrated = {part: calibration(outputs) for part, outputs in raw.items()}
    return {
        "method": calibration.method,
        **{
            when: {
                part: {name: figures[name] for name in ("log_loss", "brier") if name in figures}
                for part, figures in _measure(metrics, outputs, labels).items()
            }
            for when, outputs in (("before", raw), ("after", calibrated))
        },
    }


def _decide(
    settings: DecisionSettings,
    classes: tuple[str, ...],
    shares: Mapping[str, Doubles],
    labels: Mapping[str, Labels],
    *,
    fitted: bool,
) -> tuple[Threshold, dict[str, Any]]:
    """Return the threshold for two classes, and its entry in summary.json."""
    goal: Goal = settings.resolved(fitted=fitted)
    if goal == "accuracy":
        threshold = Threshold()
    else:
        threshold = choose_threshold(settings, goal, shares["validation"][:, 1], labels["validation"])
    return threshold, {
        "goal": goal,
        "at_least": settings.at_least,
        "reached": threshold.reached and settings.goal in ("auto", goal),
        "positive": classes[1],
        "threshold": threshold.value,
        **{
            part: decision_figures(settings, threshold.value, shares[part][:, 1], labels[part])
            if part in shares
            else None
            for part in ("validation", "test")
        },
    }


def _scores(
    classes: tuple[str, ...], labels: Mapping[str, Labels], values: Mapping[str, Doubles]
) -> pl.DataFrame:
    """Return one line per held-out row, with its part, label and score.

    The columns are `part` ("validation" or "test"), `label` (the name of the class, or the number) and
    `score` (the probability of the second of two classes, or the predicted number). With more than two
    classes, the columns `score_0`, `score_1` and so on hold the probability of each class instead.

    Args:
        values: part -> probabilities [rows, classes], or numbers [rows, 1].
    """
    parts = [_part_scores(classes, part, labels[part], scores) for part, scores in values.items()]
    return (
        pl.concat(parts)
        if parts
        else _part_scores(classes, "", np.empty(0), np.empty((0, len(classes) or 1)))
    )


def beside_alone(scores: pl.DataFrame, alone: pl.DataFrame) -> pl.DataFrame:
    """Return the content of scores.parquet with the scores of the baseline "label holder alone" added.

    Args:
        scores, alone: `Conclusion.scores` of the run and of the baseline, on the same held-out rows.

    Returns:
        `scores` with a column `alone_score` (`alone_score_0` and so on) for each of its score columns. The
        new columns are null in parts that were not measured for the baseline.
    """
    # The baseline may lack a part, so join by the position of each row within its part.
    names = [name for name in alone.columns if name.startswith("score")]
    row = pl.int_range(pl.len()).over("part").alias("row")
    added = alone.select("part", row, pl.col(names).name.prefix("alone_"))
    return (
        scores.with_columns(row)
        .join(added, on=["part", "row"], how="left", maintain_order="left")
        .drop("row")
    )


def _part_scores(classes: tuple[str, ...], part: str, labels: Labels, values: Doubles) -> pl.DataFrame:
    names = pl.Series("part", [part], dtype=pl.String).new_from_index(0, len(labels))
    if not classes:
        return pl.DataFrame({"part": names, "label": labels.astype(np.float64), "score": values[:, 0]})
    known = pl.Series("label", classes, dtype=pl.String).gather(labels.astype(np.int64))
    columns = (
        {"score": values[:, 1]} if len(classes) == 2 else {f"score_{k}": v for k, v in enumerate(values.T)}
    )
    return pl.DataFrame({"part": names, "label": known, **columns})
