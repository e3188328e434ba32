"""Irregular measurements of stays in hospital, made regular: one value an hour, and whether there was one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vafl.data.dataset import Array

HOURS = 48
SEEN = ":seen"
_EXTREMES = (0.5, 99.5)  # percentiles: beyond them are slips of the keyboard, a temperature of -17 for one


@dataclass(frozen=True)
class Measurements:
    """What was measured when, of one set of stays; all [measurements].

    Attributes:
        stay, feature: numbers of both, from 0.
        hour: since admission.
    """

    stay: npt.NDArray[np.integer]
    hour: npt.NDArray[np.floating]
    feature: npt.NDArray[np.integer]
    value: npt.NDArray[np.floating]


def by_hour(found: Measurements, stays: int, features: int) -> Array:
    """[stays, 48, features], the mean of each hour; NaN where nothing was measured."""
    usable = np.isfinite(found.value) & (found.hour >= 0) & (found.hour <= HOURS)
    hour = np.minimum(found.hour[usable].astype(np.int64), HOURS - 1)
    cell = (found.stay[usable].astype(np.int64) * HOURS + hour) * features + found.feature[usable]
    cells = stays * HOURS * features
    counts = np.bincount(cell, minlength=cells)
    sums = np.bincount(cell, found.value[usable], minlength=cells)
    with np.errstate(invalid="ignore"):
        means = sums / counts
    return means.reshape(stays, HOURS, features).astype(np.float32)


def filled(train: Array, test: Array) -> Array:
    """[stays, 48, 2 * features], test stays last: values without gaps, then 1 where one was measured, else 0.

    A gap has the value of the hour before; before the first one it is the training stays' mean. Values are
    kept within what is usual in the training stays.
    """
    measured = train.reshape(-1, train.shape[-1])
    known = ~np.isnan(measured)
    low, high, mean = (np.zeros(train.shape[-1], np.float32) for _ in range(3))
    for feature in np.flatnonzero(known.any(axis=0)):
        values = measured[known[:, feature], feature]
        low[feature], high[feature] = np.percentile(values, _EXTREMES, method="nearest")
        mean[feature] = values.clip(low[feature], high[feature]).mean()
    return np.concatenate([_without_gaps(part.clip(low, high), mean) for part in (train, test)])


def names(features: Sequence[str]) -> tuple[str, ...]:
    """The columns of `filled`."""
    return (*features, *(feature + SEEN for feature in features))


def _without_gaps(values: Array, mean: Array) -> Array:
    seen = ~np.isnan(values)
    hours = np.arange(values.shape[1])[:, None]
    last = np.maximum.accumulate(np.where(seen, hours, 0), axis=1)
    carried = np.take_along_axis(values, last, axis=1)
    return np.concatenate([np.where(np.isnan(carried), mean, carried), seen], axis=2, dtype=np.float32)
