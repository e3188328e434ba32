"""The report of a run: RUN/report.html, one self-contained page for managers.

statistics.py       curves, intervals and bins, as pure functions of arrays
figures.py          small SVG charts
markup.py           HTML and SVG with escaped text
blocks.py           sections, tables, figures and notices
words.py            numbers and names as text
inputs.py           read and check the files of the run folder
result.py           the title, the warnings and the result
sections.py         the other sections that every report has
two_classes.py, several_classes.py, numbers.py
                    the sections about the scores, by kind of label
page.py, page.css   the document and its style
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vafl.files import write_atomically
from vafl.observe.record import REPORT
from vafl.observe.report.inputs import read_inputs
from vafl.observe.report.page import render


def write_report(folder: Path, accounts: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Write the report of the finished run in `folder`, and return its path.

    Only its owner can read the report, because it is derived from scores of people.

    Args:
        folder: The run folder.
        accounts: The statements of the privacy ledgers on this machine (`Statement.as_json`), one per party.

    Raises:
        RunFolderError: The run has not ended, or one of its files is damaged.
    """
    path = folder / REPORT
    write_atomically(path, render(read_inputs(folder, accounts)).encode(), private=True)
    return path
