"""The report: one page with the figure and table of every study, and results.json with the same content."""

import base64
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.measures import Outcome, Row, as_document
from experiments.results import Verdict
from vafl.observe.record import versions

_NOTHING = "\N{EN DASH}"
_STYLE = """
body { font: 15px/1.5 Georgia, 'Times New Roman', serif; color: #1a1a1a; max-width: 62rem; margin: 2rem auto;
  padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin-bottom: 0.2rem; }
h2 { font-size: 1.3rem; margin-top: 2.6rem; border-bottom: 1px solid #ccc; }
h3 { font-size: 1.1rem; margin: 2.2rem 0 0.3rem; }
p { max-width: 48rem; }
table { border-collapse: collapse; font-size: 0.86rem; margin: 0.8rem 0; }
.wide { overflow-x: auto; }
.wide img, .wide table { min-width: 40rem; }
th { text-align: left; border: solid #333; border-width: 1.5px 0; vertical-align: bottom; }
td { border-bottom: 1px solid #e3e3e3; vertical-align: top; }
th, td { padding: 0.25rem 0.9rem 0.25rem 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr:last-child td { border-bottom: 1.5px solid #333; }
.yes { color: #00694d; font-weight: bold; } .no { color: #b33c00; font-weight: bold; }
img { width: 100%; max-width: 56rem; }
code, pre { font: 0.85rem/1.4 ui-monospace, Menlo, Consolas, monospace; background: #f5f5f2; }
pre { padding: 0.5rem 0.8rem; overflow-x: auto; }
.small { font-size: 0.86rem; color: #444; }
"""
_UNTUNED = "* Not every run of the grid has been made for it yet: this step size is not known to be the best."
_HOW = """Every run is a simulation on a virtual clock with the paper's delays; links cost no time. Each
rule's step size is the best of one grid, the same for all rules, by runs that are measured on a sixth of
the training rows, held out (a third for the two smallest sets): of the step sizes that end within a quarter
of a point of the best (more for those two), the one that is fastest to the level. Only the final runs see
the test rows. Lines are means over the seeds, and bands reach from the lowest to the highest seed; private
variants (dashed) add the paper's noise (mode embed_only), which guarantees no record anything, and use the
step size of their rule. The end of a run is the mean of the last tenth of its
evaluations. The level that is timed is what sync ends at, less half a point, unless another is named; the
time is when the mean over the seeds first is there. A pass is as many uploads of a client as there are
minibatches in the training rows; the loss is that of the minibatches as the server sees it, with embeddings
as old as they are."""


def write_report(out: Path, outcomes: Sequence[Outcome], *, quick: bool) -> int:
    """Write index.html and results.json, and print the verdicts. Return 0 if all hold, otherwise 1."""
    document = {
        "quick": quick,
        "versions": versions(),
        "experiments": {outcome.study.name: as_document(outcome) for outcome in outcomes},
    }
    text = json.dumps(document, indent=2, allow_nan=False)
    (out / "results.json").write_text(text + "\n", encoding="utf-8")
    (out / "index.html").write_text(_page(out, outcomes, quick), encoding="utf-8")
    table = Table("study", "asked", "measured", "target", "holds")
    for outcome in outcomes:
        for verdict in outcome.verdicts:
            table.add_row(
                outcome.study.name,
                verdict.claim,
                verdict.measured,
                verdict.target,
                "[green]yes[/]" if verdict.holds else "[red]no[/]",
            )
    console = Console()
    console.print(table)
    console.print(f"written: {out / 'index.html'}", highlight=False, soft_wrap=True)
    held = all(verdict.holds for outcome in outcomes for verdict in outcome.verdicts)
    return 0 if held or quick else 1  # short runs prove nothing


def _page(out: Path, outcomes: Sequence[Outcome], quick: bool) -> str:
    paper = [outcome for outcome in outcomes if outcome.study.paper]
    beyond = [outcome for outcome in outcomes if not outcome.study.paper]
    parts = [
        "<h1>VAFL's experiments, made again</h1>",
        f'<p class="small">{escape(_made_by())}</p>',
        "<p><b>A quick look, not the result:</b> one seed, one step size, short runs.</p>" if quick else "",
        f"<p>{escape(_HOW)}</p>",
        "<pre>make experiments DATA=../shared/data   # all of it; goes on where it was interrupted</pre>",
        "<h2>What the paper claims, and what we find</h2>",
        _claims(paper),
        *(_section(out, outcome) for outcome in paper),
        "<h2>Beyond the paper</h2>" if beyond else "",
        *(_section(out, outcome) for outcome in beyond),
    ]
    screen = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{screen}<title>VAFL: experiments</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _made_by() -> str:
    return "Made with " + ", ".join(f"{name} {number}" for name, number in versions().items()) + "."


def _claims(outcomes: Sequence[Outcome]) -> str:
    lines = []
    for outcome in outcomes:
        for number, verdict in enumerate(outcome.verdicts):
            first = number == 0
            lines.append(
                [
                    _link(outcome) if first else "",
                    escape(outcome.study.paper) if first else "",
                    escape(verdict.claim),
                    escape(verdict.measured),
                    escape(verdict.target),
                    _mark(verdict),
                ]
            )
    return _table(
        ["experiment", "the paper's claim", "asked of ours", "measured", "target", "holds"], lines, 6
    )


def _link(outcome: Outcome) -> str:
    return f'<a href="#{outcome.study.name}">{escape(outcome.study.title)}</a>'


def _mark(verdict: Verdict) -> str:
    return '<span class="yes">yes</span>' if verdict.holds else '<span class="no">no</span>'


def _section(out: Path, outcome: Outcome) -> str:
    study = outcome.study
    picture = base64.b64encode((out / "figures" / f"{study.name}.png").read_bytes()).decode()
    verdicts = "; ".join(
        f"{escape(verdict.claim)}: {escape(verdict.measured)} ({escape(verdict.target)}) {_mark(verdict)}"
        for verdict in outcome.verdicts
    )
    parts = [
        f'<h3 id="{study.name}">{escape(study.title)}</h3>',
        f"<p>{escape(study.note)}</p>" if study.note else "",
        f'<div class="wide"><img alt="{escape(study.title)}" src="data:image/png;base64,{picture}"></div>',
        f"<p>{verdicts}.</p>" if verdicts else "",
        "" if all(verdict.holds for verdict in outcome.verdicts) else f"<p>{escape(study.why)}</p>",
        f"<p><b>Tried before.</b> {escape(study.before)}</p>" if study.before else "",
        _table(*_rows(outcome), words=1),
        "" if all(row.tuned for row in outcome.rows) else f'<p class="small">{_UNTUNED}</p>',
        f"<pre>python -m experiments {study.name} --data ../shared/data</pre>",
    ]
    return "".join(parts)


def _rows(outcome: Outcome) -> tuple[list[str], list[list[str]]]:
    metric = "AUC" if outcome.study.metric == "auc" else outcome.study.metric
    timed = any(row.seconds is not None for row in outcome.rows)
    level = f"to {outcome.level:.3f}" if timed else ""
    headings = ["variant", "step size", "seeds", f"final {metric}", "lowest to highest"]
    headings += [f"seconds {level}", f"MB {level}"] if timed else []
    headings += ["updates", "mean delay", "longest seen"]
    return headings, [[escape(cell) for cell in _cells(row, timed)] for row in outcome.rows]


def _cells(row: Row, timed: bool) -> list[str]:
    digits = 4
    cells = [
        row.variant,
        f"{row.step_size:g}" + ("" if row.tuned else "*"),
        str(row.seeds) + (f" ({row.diverged} diverged)" if row.diverged else ""),
        f"{row.metric:.{digits}f}",
        f"{row.low:.{digits}f} to {row.high:.{digits}f}",
    ]
    if timed:
        cells += [_number(row.seconds), _number(row.megabytes)]
    return [*cells, f"{row.updates:,.0f}", f"{row.delay:.1f}", f"{row.longest_delay:,}"]


def _number(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _table(headings: Sequence[str], lines: Sequence[Sequence[Any]], words: int) -> str:
    """Return a table with `words` columns of text, then columns of numbers."""

    def cells(kind: str, line: Sequence[Any]) -> str:
        marks = ["" if column < words else ' class="n"' for column in range(len(line))]
        return "".join(f"<{kind}{mark}>{cell}</{kind}>" for mark, cell in zip(marks, line, strict=True))

    body = "".join(f"<tr>{cells('td', line)}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{cells("th", headings)}</tr>{body}</table></div>'
