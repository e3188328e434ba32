"""importance.json, its table and its plot."""

import io
import json

from rich.console import Console

from vafl.observe.importance import Importance, Measured, table


def test_parties_and_features_are_written_shown_and_drawn(tmp_path):
    names = ["in$come$", "x" * 300, "Größe", *(f"column {n}" for n in range(30))]
    columns = {name: Measured(0.1 * place, 0.01, None, None, 50) for place, name in enumerate(names)}
    parties = {"shop": Measured(0.2, 0.02, 0.05, 0.01, 50), "bank": Measured(0.7, 0.1, -0.01, 0.0, 50)}
    made = Importance("auc", "log_loss", 50, 5, {"auc": 0.8}, parties, {"bank": columns}, {"shop": "no"})
    for path in made.write(tmp_path):
        assert path.stat().st_size > 100
    read = json.loads((tmp_path / "importance.json").read_text())
    assert read["parties"]["bank"]["loss_increase"] == 0.7
    assert read["features"]["bank"]["in$come$"]["headline_drop"] is None
    assert (read["metric"], read["rows"], read["refused"]) == ("auc", 50, {"shop": "no"})
    output = io.StringIO()
    Console(file=output, width=200).print(table(made))
    lines = output.getvalue().splitlines()
    assert lines[1].startswith("bank"), "the most important first"
    assert "0.7000" in lines[1]
