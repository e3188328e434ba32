"""Resample irregular measurements of hospital stays to one value per hour, with indicators of gaps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vafl.arrays import Floats

HOURS = 48
SEEN = ":seen"
_EXTREMES = (0.5, 99.5)  # percentiles: values beyond are often typing errors, such as a temperature of -17


@dataclass(frozen=True)
class Measurements:
    """The measurements of one set of stays. All arrays are [measurements].

    Attributes:
        stay: the number of the stay, from 0.
        hour: hours since admission.
        feature: the number of the feature, from 0.
        value: the measured value; NaN is ignored.
    """

    stay: npt.NDArray[np.integer]
    hour: npt.NDArray[np.floating]
    feature: npt.NDArray[np.integer]
    value: npt.NDArray[np.floating]


def by_hour(measurements: Measurements, stays: int, features: int) -> Floats:
    """Return the mean of each hour, [stays, 48, features]; NaN where nothing was measured."""
    value, hours = measurements.value, measurements.hour
    usable = np.isfinite(value) & (hours >= 0) & (hours <= HOURS)
    hour = np.minimum(hours[usable].astype(np.int64), HOURS - 1)  # hour 48.0 belongs to the last hour
    stay, feature = measurements.stay[usable].astype(np.int64), measurements.feature[usable]
    cell = (stay * HOURS + hour) * features + feature
    cells = stays * HOURS * features
    counts = np.bincount(cell, minlength=cells)
    sums = np.bincount(cell, value[usable], minlength=cells)
    with np.errstate(invalid="ignore"):
        means = sums / counts
    return means.reshape(stays, HOURS, features).astype(np.float32)


def filled(train: Floats, test: Floats) -> Floats:
    """Fill gaps, and return [stays, 48, 2 * features] with the test stays last.

    The first half of the columns are values without gaps. The second half are 1 if the value was measured in
    that hour, otherwise 0. A gap takes the value of the hour before. Before the first measurement, it takes
    the mean of the training stays. Values are clipped to the 0.5 and 99.5 percentiles of the training stays.
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
    """Return the column names of the array that `filled` returns."""
    return (*features, *(feature + SEEN for feature in features))


def _without_gaps(values: Floats, mean: Floats) -> Floats:
    """Fill gaps by the last value or the mean, and append the indicators of measured values."""
    seen = ~np.isnan(values)
    # `last` is the hour of the last measurement so far; 0 before the first one, where the value is NaN.
    hours = np.arange(values.shape[1])[:, None]
    last = np.maximum.accumulate(np.where(seen, hours, 0), axis=1)
    carried = np.take_along_axis(values, last, axis=1)
    return np.concatenate([np.where(np.isnan(carried), mean, carried), seen], axis=2, dtype=np.float32)
