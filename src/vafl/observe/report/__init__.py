"""The report of a run: RUN/report.html, one self-contained page for managers.

statistics.py       curves, intervals and bins, as pure functions of arrays
figures.py          small SVG charts
markup.py           HTML and SVG in which every text is escaped
inputs.py           the run folder's files, read and checked
sections.py         the sections that every report has; two_classes.py, several_classes.py and numbers.py
                    have those about the scores
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

    Only its owner can read it: it is derived from scores of people.

    Args:
        folder: The run's.
        accounts: What the privacy ledgers on this machine say (`Statement.as_json`), one a party.

    Raises:
        RunFolderError: The run has not ended, or a file of it is damaged.
    """
    path = folder / REPORT
    write_atomically(path, render(read_inputs(folder, accounts)).encode(), private=True)
    return path
