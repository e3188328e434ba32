"""Prometheus' text format: samples can be read back, and histograms are cumulative."""

from hypothesis import given
from hypothesis import strategies as st

from tests.prometheus import parse
from vafl.observe.prometheus import Histogram, exposition

LABELS = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.text(st.characters(exclude_categories=["Cs"])))


@given(st.lists(st.tuples(st.sampled_from(["one", "two_total"]), LABELS, st.floats(allow_nan=False))))
def test_samples_are_read_back_as_they_were(samples):
    text = exposition({"one": ("gauge", "A"), "two_total": ("counter", "B")}, samples)
    found = parse(text)
    for name in ("one", "two_total"):
        assert found.get(name, []) == [(labels, value) for own, labels, value in samples if own == name]


@given(st.lists(st.floats(-10, 10)))
def test_a_histogram_counts_every_value_once(values):
    bounds = (-1.0, 0.0, 2.5)
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    found = parse(exposition({"h": ("histogram", "H")}, histogram.samples("h")))
    expected = {str(bound): sum(value <= bound for value in values) for bound in bounds}
    counts = {labels["le"]: count for labels, count in found["h_bucket"]}
    assert counts == {**expected, "+Inf": len(values)}
    assert found["h_count"] == [({}, len(values))]
