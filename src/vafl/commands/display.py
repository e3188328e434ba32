"""Where a command prints what people read."""

import os
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

_WIDTH = 160  # of what is no terminal: tables of a log lose nothing


class Display(Console):
    """A terminal or a file; a run goes on when nobody reads any more.

    Text is shown as it is: file, column and class names have brackets and colons of their own, which rich
    would read as its markup. What is to have a style says so by `style` or `rich.text.Text`.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _WIDTH

    def print(self, *objects: Any, **how: Any) -> None:
        """Text keeps its lines, for a path in two of them is none to copy; tables fit into the width."""
        if all(isinstance(one, str | Text) for one in objects):
            how.setdefault("soft_wrap", True)
        super().print(*objects, **how)

    def on_broken_pipe(self) -> None:
        """Where rich would exit, whichever thread that happens to be in."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
