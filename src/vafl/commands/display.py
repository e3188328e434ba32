"""Where a command prints what people read."""

import os
import sys

from rich.console import Console


class Display(Console):
    """A terminal or a file; a run goes on when nobody reads any more."""

    def on_broken_pipe(self) -> None:
        """Where rich would exit, whichever thread that happens to be in."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
