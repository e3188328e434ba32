"""Find columns that predict the label almost perfectly by themselves: usually the label under another name.

Such a column is known only after the event that the model should predict, like the amount of a claim when the
label is "has a claim". A model that uses it looks excellent until it scores a new record.
"""

from dataclasses import dataclass

import numpy as np

from vafl.arrays import Doubles, Floats, Integers, Labels
from vafl.data.encoding import Encoder
from vafl.data.partition import VerticalData

_SUSPICIOUS = 0.98  # report a column from this share of the label's variance on
_MOST_ROWS = 50_000  # of a larger table, use an evenly spaced sample
_FEWEST_ROWS = 100  # with fewer rows, a column may predict all labels by chance


@dataclass(frozen=True)
class Suspect:
    """A column that may be the label under another name.

    Attributes:
        share: the share of the label's variance, 0 to 1, that the column alone explains on rows that were not
            used for the fit.
    """

    column: str
    share: float

    def __str__(self) -> str:
        return (
            f'"{self.column}" alone explains {self.share:.1%} of the label. If its value becomes known only '
            "after the label, add it to `ignore`."
        )


def warnings(data: VerticalData) -> list[str]:
    """Return a warning for every suspicious column that this process can see.

    A process with the labels and one party's features checks only that party's columns.
    """
    labels, classes = data.labels[data.train].numpy(), len(data.classes or ())
    return [
        f"{party.name}: {suspect}"
        for party in data.parties
        if isinstance(party.encoder, Encoder) and party.encoder.form == "codes" and party.features.numel()
        for suspect in leakage_suspects(party.encoder, party.features[data.train].numpy(), labels, classes)
    ]


def leakage_suspects(encoder: Encoder, codes: Floats, labels: Labels, classes: int) -> list[Suspect]:
    """Return the columns of a table that predict the labels almost perfectly, the worst first.

    The codes of each column are divided into bins. Half of the rows give every bin its mean label, and the
    other half measures how well these means predict. Ids are not reported, because their values do not
    repeat.

    Args:
        encoder: an encoder of the `codes` form.
        codes: [rows, columns] of the training rows.
        labels: [rows], class numbers, or the values of a regression.
        classes: the number of classes; 0 for a regression.
    """
    if len(labels) < _FEWEST_ROWS:
        return []
    step = -(-len(labels) // _MOST_ROWS)
    # Copied once: the codes may be a file that is larger than memory, and each column is read on its own.
    codes, labels = np.ascontiguousarray(codes[::step]), labels[::step]
    targets = np.eye(classes)[labels.astype(np.int64)] if classes else labels.astype(np.float64)[:, None]
    fit, check = slice(0, None, 2), slice(1, None, 2)
    mean = targets[fit].mean(axis=0)
    spread = np.square(targets[check] - mean).sum()
    if not spread:
        return []
    suspects = []
    for column, name in enumerate(encoder.names):
        bins = _bins(codes[:, column])
        predicted = _bin_means(bins[fit], targets[fit], int(bins.max()) + 1)[bins[check]]
        share = 1 - float(np.square(targets[check] - predicted).sum() / spread)
        if share >= _SUSPICIOUS:
            suspects.append(Suspect(name, share))
    return sorted(suspects, key=lambda suspect: -suspect.share)


def _bins(codes: Floats) -> Integers:
    """Return the bin of each code, [rows]: one bin per edge, and one per interval between two edges.

    Values on an edge have a bin to themselves, because zero often means something else than a small amount.
    Missing numbers have the code -1 and the first bin.
    """
    floors = np.floor(codes)
    return (2 * (floors + 1) + (codes > floors)).astype(np.int64)


def _bin_means(bins: Integers, targets: Doubles, count: int) -> Doubles:
    """Return the mean target of each bin, [count, targets]. An empty bin takes the nearest bin below it."""
    rows = np.bincount(bins, minlength=count)
    sums = np.stack([np.bincount(bins, target, minlength=count) for target in targets.T], axis=1)
    nearest = np.maximum.accumulate(np.where(rows > 0, np.arange(count), bins.min()))
    means: Doubles = sums[nearest] / rows[nearest, None]
    return means
