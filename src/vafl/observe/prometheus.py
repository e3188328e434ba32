"""Prometheus' text format, version 0.0.4, for `vafl watch` and `vafl serve`."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

Sample = tuple[str, Mapping[str, str], float]
"""The name of a metric, its labels, and its value."""

Families = Mapping[str, tuple[str, str]]
"""The name of a metric -> its kind (`counter`, `gauge` or `histogram`) and what it measures."""


def exposition(families: Families, samples: Iterable[Sample]) -> str:
    """Return the samples as text, grouped by family in the order of `families`."""
    grouped: dict[str, list[str]] = {name: [] for name in families}
    for sample in samples:
        grouped[_family(sample[0], families)].append(_line(sample))
    lines = []
    for name, family_lines in grouped.items():
        if family_lines:
            kind, about = families[name]
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *family_lines]
    return "\n".join([*lines, ""])


class Histogram:
    """Counts values in buckets.

    Args:
        bounds: The upper bounds of the buckets, ascending. One more bucket counts larger values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, name: str) -> Iterator[Sample]:
        """Yield the histogram in Prometheus' form: cumulative buckets, the sum and the count."""
        for bound, count in zip([*map(str, self._bounds), "+Inf"], accumulate(self._counts), strict=True):
            yield f"{name}_bucket", {"le": bound}, count
        yield f"{name}_sum", {}, self._sum
        yield f"{name}_count", {}, sum(self._counts)


def _family(name: str, families: Families) -> str:
    return name if name in families else name.rpartition("_")[0]


def _line(sample: Sample) -> str:
    name, labels, value = sample
    pairs = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items())
    return f"{name}{{{pairs}}} {value!r}" if pairs else f"{name} {value!r}"
