"""The demonstration ends with what the README promises."""

import json

from rich.console import Console

from vafl.demo import demo


def test_demo_writes_every_run_and_the_page(tmp_path):
    with (tmp_path / "log").open("w") as log:
        demo(tmp_path / "demo", Console(file=log))
    assert {path.name for path in (tmp_path / "demo" / "async" / "logs").iterdir()} == {
        f"client-{number}.log" for number in range(1, 5)
    }
    for rule in ("async", "t-sync", "sync", "centralised"):
        summary = json.loads((tmp_path / "demo" / rule / "summary.json").read_text())
        assert summary["rule"] == rule
        assert summary["metric"]["value"] > (0.92 if rule == "centralised" else 0.75)  # by the wall's clock
    page = (tmp_path / "demo" / "index.html").read_text()
    assert "<svg" in page
    assert page.count("<tr>") == 5
    assert "times as long" in page
    assert "http-equiv" not in page.split("<svg")[0]
