"""The README's example runs unchanged."""

import re
import runpy
from pathlib import Path

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"


def test_the_quickstart_shows_that_together_is_better_than_alone(capsys):
    runpy.run_path(str(QUICKSTART), run_name="__main__")
    together, *parties = capsys.readouterr().out.splitlines()
    best = int(re.fullmatch(r"together: (\d+)% right", together)[1])
    assert best >= 94
    for line, party in zip(parties, ["bank", "shop", "hospital"], strict=True):
        alone = re.fullmatch(
            party + r" alone: (\d+)% right; together: [\d,]+ bytes sent, used \d+\.\d updates later", line
        )
        assert int(alone[1]) < best - 10


def test_the_quickstart_is_short():
    assert len(QUICKSTART.read_text(encoding="utf-8").splitlines()) <= 20
