"""What a run leaves behind about its held-out rows."""

import polars as pl
import pytest
import torch

from vafl.build import build
from vafl.conclusion import score_table
from vafl.config import from_document


def run_of(**sections):
    return build(from_document({"schedule": {"batch_size": 4}, **sections}))


def test_several_classes_have_a_score_each():
    run = run_of(data={"name": "iris", "validation_fraction": 0.2}, stop={"updates": 5})
    run.train()
    run.evaluator.test()
    table = score_table(run.task, run.data, run.evaluator.measured)
    assert table.columns == ["part", "label", "score_0", "score_1", "score_2"]
    assert table["part"].to_list() == ["validation"] * 30 + ["test"] * 38
    assert table["label"].to_list() == [
        run.data.classes[label] for label in run.data.labels[run.data.rows :].tolist()
    ]
    assert table.select(pl.sum_horizontal(pl.col("^score_.*$"))).to_series().to_list() == pytest.approx(
        [1] * 68
    )
    expected = run.evaluator.measured["test"].double().softmax(1)
    assert torch.allclose(torch.from_numpy(table[30:, 2:].to_numpy()), expected)


def test_numbers_have_a_prediction():
    run = run_of(data={"name": "diabetes"}, stop={"updates": 5}, optimiser={"step_size": 0.01})
    run.train()
    table = score_table(run.task, run.data, run.evaluator.measured)
    assert table.columns == ["part", "label", "score"]
    assert set(table["part"]) == {"test"}
    assert table["label"].to_list() == run.data.labels[run.data.test].tolist()
    assert table["score"].to_list() == run.evaluator.measured["test"][:, 0].tolist()


def test_rows_that_were_not_measured_have_no_scores():
    """As where no client answered for the test rows."""
    run = run_of(data={"name": "breast_cancer", "validation_fraction": 0.2}, stop={"updates": 5})
    run.train()
    assert set(score_table(run.task, run.data, run.evaluator.measured)["part"]) == {"validation"}
    assert score_table(run.task, run.data, {}).is_empty()
