"""What a process that computes does besides: worker processes load this module, so it imports little."""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait


def serve_parent() -> None:
    """Leaves interrupts to the parent, and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def ready() -> None:
    """Called to have a process that can compute at once."""


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
