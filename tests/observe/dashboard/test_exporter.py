"""Metrics in Prometheus' text format, version 0.0.4."""

import re

from tests.observe.dashboard.folders import written
from vafl.observe.dashboard.exporter import as_prometheus
from vafl.observe.dashboard.views import view

SAMPLE = re.compile(r'[a-z_]+\{([a-z]+="([^"\\\n]|\\["\\n])*",?)+\} -?[0-9.e+-]+')


def test_every_metric_is_explained_once_and_has_a_value_for_each_run_and_client(tmp_path):
    views = [view(written(tmp_path / name, share=0.4), name) for name in ("one", "two")]
    text = as_prometheus(views)
    assert text.endswith("\n")
    assert 'vafl_updates_total{run="one"} 80' in text
    assert 'vafl_client_here{run="two",client="shop"} 0.0' in text
    assert 'vafl_client_bytes_total{run="one",client="bank",direction="up"} 2000000' in text
    assert 'vafl_metric{run="one",rows="validation",name="accuracy"} 0.7' in text
    assert 'vafl_metric{run="one",rows="validation",name="log_loss"} 0.3' in text
    assert "macro_f1" not in text  # undefined metrics are left out
    assert 'vafl_baseline_metric{run="two",baseline="trivial",rows="test",name="accuracy"} 0.24' in text
    explained = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(explained) == len(set(explained))
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(SAMPLE.fullmatch(line) for line in samples)
    assert {line.partition("{")[0] for line in samples} == set(explained)


def test_a_name_cannot_pass_for_something_else(tmp_path):
    text = as_prometheus([view(written(tmp_path / "run", points=0), 'a"} 1\n\\')])
    assert text.splitlines()[2] == r'vafl_run_up{run="a\"} 1\n\\"} 0.0'


def test_a_run_that_says_nothing_is_down(tmp_path):
    text = as_prometheus([view(written(tmp_path / "run", points=1), "run")])
    assert 'vafl_run_up{run="run"} 0.0' in text
    assert "vafl_updates_total" not in text
