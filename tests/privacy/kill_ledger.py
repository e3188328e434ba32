"""Kills a process that charges a ledger and sends, again and again.

python -m tests.privacy.kill_ledger FILE KILLS prints how often the ledger showed less than was sent.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from vafl.privacy.ledger import KINDS, Ledger, read_ledger

RECORDS, BATCH = 5_000, 64


def upload_for_ever(path: Path, pipe: int) -> None:
    ledger = Ledger(path, RECORDS, "test")
    generator = np.random.default_rng()
    while True:
        rows = generator.choice(RECORDS, BATCH, replace=False)
        ledger.charge(rows, "batch", 0.25)
        os.write(pipe, rows.astype("<i8").tobytes())  # below PIPE_BUF: whole or not at all


def main(path: Path, kills: int) -> int:
    sent, short = np.zeros(RECORDS, dtype=np.int64), 0
    for _ in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            upload_for_ever(path, writing)
        os.close(writing)
        first = os.read(reading, 8 * BATCH)
        time.sleep(random.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        content = first + b"".join(iter(lambda own=reading: os.read(own, 1 << 16), b""))
        os.close(reading)
        np.add.at(sent, np.frombuffer(content, "<i8"), 1)
        ledger = read_ledger(path)
        counted, spent = ledger.counts[KINDS.index("batch")], ledger.spent
        short += bool((counted < sent).any() or (spent < 0.25 * sent).any())
    print(f"{kills} kills, {int(sent.sum())} vectors sent, {short} times short")
    return short


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1]), int(sys.argv[2]))))
