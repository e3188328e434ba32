"""A self-contained HTML page that compares runs: paragraphs, a table, a plot and the commands."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from vafl.observe.compare import Comparison, cells, headings

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
  :root { color-scheme: light; }
  body { font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; margin: 0; }
  body { color: #1d2733; background: #f6f7f9; }
  main { max-width: 72rem; margin: 2.5rem auto; padding: 0 1.5rem; }
  h1 { font-size: 1.7rem; margin: 0 0 .5rem; }
  h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
  .card { background: #fff; border: 1px solid #e1e5ea; border-radius: 10px; }
  .card { padding: 1.2rem; overflow-x: auto; }
  .card svg { width: 100%; min-width: 44rem; height: auto; }  /* scroll instead of shrinking on a phone */
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
  th, td { text-align: right; padding: .45rem .7rem; border-bottom: 1px solid #edf0f3; white-space: nowrap; }
  th { font-weight: 600; font-size: .85rem; color: #5a6773; }
  th:first-child, td:first-child { text-align: left; }
  tr:last-child td { border-bottom: 0; }
  code, pre { font: .9rem ui-monospace, "DejaVu Sans Mono", monospace; }
  pre { margin: 0; white-space: pre-wrap; }
  .headline { font-size: 1.1rem; }
</style>
</head>
<body><main>
<h1>$title</h1>
$paragraphs
<h2>What each rule reached, and what it took</h2>
<div class="card"><table><thead><tr>$heads</tr></thead><tbody>$rows</tbody></table></div>
<h2>On the way there</h2>
<div class="card">$picture</div>
<h2>Run it yourself</h2>
<div class="card"><pre>$commands</pre></div>
</main></body></html>
""")


def write_page(
    path: Path,
    title: str,
    paragraphs: Sequence[str],
    lines: Sequence[Comparison],
    metric: str,
    target: float,
    svg: Path,
    commands: Sequence[str],
) -> None:
    """Write the page to `path`, with the plot in `svg` embedded."""
    drawing = svg.read_text(encoding="utf-8")
    page = _PAGE.substitute(
        title=escape(title),
        paragraphs="\n".join(f'<p class="headline">{escape(text)}</p>' for text in paragraphs),
        heads="".join(f"<th>{escape(heading)}</th>" for heading in headings(metric, target)),
        rows="".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells(line))}</tr>" for line in lines
        ),
        picture=drawing[drawing.index("<svg") :],
        commands=escape("\n".join(commands)),
    )
    path.write_text(page, encoding="utf-8")
