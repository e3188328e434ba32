"""Columns that alone predict the label almost perfectly: usually the label under another name.

Such a column is known only after the event that the model is to predict, like a claim's amount beside "has a
claim". A model that uses it looks excellent until it meets a new record.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vafl.data.encoding import Encoder
from vafl.data.partition import VerticalData

_SUSPICIOUS = 0.98  # share of the label's variance that one column explains
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
            f'"{self.column}" alone explains {self.share:.1%} of the label. If its value is known only after '
            "the label is, name it in `ignore`."
        )


def warnings(data: VerticalData) -> list[str]:
    """Return a sentence for every column at hand that may be the label in disguise.

    A process that holds the labels and one party's features learns of that party's columns only.
    """
    labels, classes = data.labels[data.train].numpy(), len(data.classes or ())
    return [
        f"{party.name}: {suspect}"
        for party in data.parties
        if party.encoder is not None and party.encoder.form == "codes" and party.features.numel()
        for suspect in leakage_suspects(party.encoder, party.features[data.train].numpy(), labels, classes)
    ]


def leakage_suspects(
    encoder: Encoder, codes: Codes, labels: npt.NDArray[np.generic], classes: int
) -> list[Suspect]:
    """Return the columns of a table that predict the labels almost perfectly, the worst first.

    Each column is cut into the bins of its codes. Half of the rows give every bin its mean label, and the
    other half tells how well that predicts. Identifiers do not pass, since their values do not repeat.

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
        bins = _bins(codes[:, column])
        predicted = _bin_means(bins[fit], targets[fit], int(bins.max()) + 1)[bins[check]]
        share = 1 - float(np.square(targets[check] - predicted).sum() / spread)
        if share >= _SUSPICIOUS:
            found.append(Suspect(name, share))
    return sorted(found, key=lambda suspect: -suspect.share)


def _bins(codes: Codes) -> npt.NDArray[np.int64]:
    """[rows]: a bin for each edge and one for each interval between two; missing numbers have the code -1.

    Values on an edge are apart from those beside it: zero often is another case than a small amount.
    """
    floors = np.floor(codes)
    return (2 * (floors + 1) + (codes > floors)).astype(np.int64)


def _bin_means(
    bins: npt.NDArray[np.int64], targets: npt.NDArray[np.float64], count: int
) -> npt.NDArray[np.float64]:
    """[count, targets]: the mean target of each bin; an empty one takes that of the nearest bin below it."""
    rows = np.bincount(bins, minlength=count)
    sums = np.stack([np.bincount(bins, own, minlength=count) for own in targets.T], axis=1)
    nearest = np.maximum.accumulate(np.where(rows > 0, np.arange(count), bins.min()))
    means: npt.NDArray[np.float64] = sums[nearest] / rows[nearest, None]
    return means
