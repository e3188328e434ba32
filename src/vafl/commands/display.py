"""The console to which commands print."""

import os
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

_WIDTH = 160  # columns if the output is not a terminal: wide enough for all tables


class Display(Console):
    """A rich console that prints text literally and survives a closed pipe.

    File, column and class names may contain brackets and colons, which rich would interpret as markup or
    emoji. Callers set styles with `style` or `rich.text.Text` instead.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _WIDTH

    def print(self, *objects: Any, **how: Any) -> None:
        """Print text without wrapping, so that paths can be copied. Tables still fit the width."""
        if all(isinstance(item, str | Text) for item in objects):
            how.setdefault("soft_wrap", True)
        super().print(*objects, **how)

    def on_broken_pipe(self) -> None:
        """Discard all further output when the reader has closed the pipe, so that a run continues.

        Rich would exit here, in any thread.
        """
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
