"""Columns that alone predict the label almost perfectly: usually the label under another name.

Such a column is known only after the event that the model is to predict, like a claim's amount beside "has a
claim". A model that uses it looks excellent until it meets a new record.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vafl.data.encoding import Encoder

_SUSPICIOUS = 0.99  # share of the labels' uncertainty (or variance) that one column removes
_MOST_ROWS = 50_000
_FEWEST_ROWS = 100  # of fewer rows, a column may predict all labels by chance
Codes = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Suspect:
    """A column that may be the label in disguise.

    Attributes:
        share: the share of the label's variance, between 0 and 1, that the column alone explains on rows that
            were not used to find out how.
    """

    column: str
    share: float

    def __str__(self) -> str:
        return (
            f'"{self.column}" alone explains {self.share:.1%} of the label. If its value is known only after the '
            "label is, name it in `ignore`."
        )


def leakage_suspects(
    encoder: Encoder, codes: Codes, labels: npt.NDArray[np.generic], classes: int
) -> list[Suspect]:
    """Return the columns of a table that predict the labels almost perfectly, the worst first.

    Each column is cut into the bins of its codes. Half of the rows give every bin its mean label, the other half
    tells how well that predicts. Identifiers fail this test, since their values do not repeat.

    Args:
        encoder: of the `codes` form.
        codes: [rows, columns] of the training rows.
        labels: [rows], class numbers or numbers.
        classes: the number of classes; 0 for numbers.
    """
    if len(labels) < _FEWEST_ROWS:
        return []
    step = -(-len(labels) // _MOST_ROWS)
    codes, labels = codes[::step], labels[::step]
    targets = np.eye(classes)[labels.astype(np.int64)] if classes else labels.astype(np.float64)[:, None]
    fit, check = slice(0, None, 2), slice(1, None, 2)
    mean = targets[fit].mean(axis=0)
    spread = np.square(targets[check] - mean).sum()
    if not spread:
        return []
    found = []
    for column, name in enumerate(encoder.names):
        bins = np.floor(codes[:, column]).astype(np.int64) + 1  # a missing number has the code -1
        predicted = _bin_means(bins[fit], targets[fit], mean, int(bins.max()) + 1)[bins[check]]
        share = 1 - float(np.square(targets[check] - predicted).sum() / spread)
        if share >= _SUSPICIOUS:
            found.append(Suspect(name, share))
    return sorted(found, key=lambda suspect: -suspect.share)


def _bin_means(
    bins: npt.NDArray[np.int64], targets: npt.NDArray[np.float64], mean: npt.NDArray[np.float64], count: int
) -> npt.NDArray[np.float64]:
    """[count, targets]: the mean target of each bin, the overall mean for an empty one."""
    rows = np.bincount(bins, minlength=count)
    sums = np.stack([np.bincount(bins, own, minlength=count) for own in targets.T], axis=1)
    return np.where(rows[:, None] > 0, sums / np.maximum(rows, 1)[:, None], mean)
