"""Compute the weight of each training row in the loss: by its class, by a weight column, or both."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from vafl.arrays import Doubles, Floats, Labels
from vafl.errors import ConfigError, DataError

ClassWeight = Literal["none", "balanced"] | dict[str, float]


def check_class_weight(setting: ClassWeight, classes: Sequence[str] | None) -> None:
    """Raise ConfigError unless `model.class_weight` fits these classes; None means a regression."""
    if setting == "none":
        return
    if classes is None:
        raise ConfigError(
            "VFL-3051",
            f"model.class_weight is only for classification. Found {setting!r} with a regression. Set it to "
            '"none", or use a weight column (parties.server.source.weight, or data.weight for a csv).',
        )
    if isinstance(setting, Mapping) and (unknown := [name for name in setting if name not in classes]):
        raise ConfigError(
            "VFL-3052",
            f"model.class_weight must name classes of the label: {', '.join(classes)}. Found {unknown[0]!r}. "
            "A class that is left out has weight 1.",
        )


def row_weights(
    setting: ClassWeight,
    labels: npt.ArrayLike,
    classes: Sequence[str] | None,
    sample_weights: npt.ArrayLike | None = None,
) -> Floats | None:
    """Return the weight of each training row, [rows], with mean 1; None if all rows weigh the same.

    The mean of 1 keeps the size of the steps: weights change the balance between rows, not the learning rate.

    Args:
        setting: `model.class_weight`.
        labels: [rows], the labels that the run trains on. With randomised response, these are the randomised
            labels, so that balanced weights reveal nothing more about the true ones.
        sample_weights: [rows], weights from the table. They are multiplied by the weight of the class.

    Raises:
        DataError: no training row has a weight above 0.
    """
    if setting == "none" and sample_weights is None:
        return None
    numbers = np.asarray(labels)
    weights = np.ones(len(numbers)) if sample_weights is None else np.asarray(sample_weights, np.float64)
    if setting != "none":
        weights = weights * class_weights(setting, numbers, classes or ())[numbers.astype(np.int64)]
    if not (mean := weights.mean()) > 0:
        raise DataError(
            "VFL-3053",
            "training needs rows with a weight above 0. Found only zeros in the weight column of the "
            f"{len(weights):,} training rows. Choose another weight column, or leave it out.",
        )
    normalised: Floats = (weights / mean).astype(np.float32)
    return normalised


def class_weights(setting: ClassWeight, labels: Labels, classes: Sequence[str]) -> Doubles:
    """Return the weight of each class, [classes], before normalisation.

    `balanced` gives every class the same total weight, as in scikit-learn: rows / (classes * rows of class).
    """
    if isinstance(setting, Mapping):
        return np.array([setting.get(name, 1.0) for name in classes])
    if setting == "none":
        return np.ones(len(classes))
    counts = np.bincount(labels.astype(np.int64), minlength=len(classes))
    balanced: Doubles = len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))
    return balanced
