"""Repeatedly kill a process that charges a ledger and sends.

python -m tests.privacy.ledger.kill_ledger FILE KILLS prints how often the ledger showed less than was sent.
Every process has the people in another order, as after a new alignment, and sometimes replaces charges by
sums. The parent does not use a ledger, because the threads of polars do not survive a fork.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

import vafl.privacy.ledger.ledger
from vafl.arrays import Integers
from vafl.privacy.ledger.accounts import KINDS
from vafl.privacy.ledger.ledger import Ledger, numbered
from vafl.privacy.ledger.spender import Spender
from vafl.privacy.settings import PrivacySettings

RECORDS, BATCH = 1_000, 64


def upload_for_ever(path: Path, pipe: int, sent: Integers) -> None:
    """Report first whether the ledger shows less than earlier processes have sent. Then upload forever."""
    vafl.privacy.ledger.ledger._LONGEST = 5_000
    ledger, generator = Ledger(path, "test"), np.random.default_rng()
    people = generator.permutation(RECORDS)
    spender = Spender("run", "training", (), PrivacySettings())
    accounts = ledger.begin(spender, numbered(RECORDS).gather(people))
    counted, spent = ledger.counts[KINDS.index("batch")][accounts], ledger.spent[accounts]
    short = (counted < sent[people]).any() or (spent < 0.25 * sent[people]).any()
    os.write(pipe, b"\1" if short else b"\0")
    while True:
        rows = generator.choice(RECORDS, BATCH, replace=False)
        ledger.charge(accounts[rows], "batch", 0.25)
        os.write(pipe, people[rows].astype("<i8").tobytes())  # below PIPE_BUF: all bytes or none


def one_life(path: Path, sent: Integers) -> bool:
    """Add what a process sends until it is killed; return whether it found the ledger short."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            upload_for_ever(path, writing, sent)
        finally:
            os._exit(1)
    os.close(writing)
    content = os.read(reading, 1) + os.read(reading, 8 * BATCH)
    time.sleep(random.uniform(0, 0.01))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    content += b"".join(iter(lambda: os.read(reading, 1 << 16), b""))
    os.close(reading)
    np.add.at(sent, np.frombuffer(content, "<i8", offset=1), 1)
    return content[:1] != b"\0"


def main(path: Path, kills: int) -> int:
    sent = np.zeros(RECORDS, dtype=np.int64)
    short = sum(one_life(path, sent) for _ in range(kills + 1))
    print(f"{kills} kills, {int(sent.sum())} vectors sent, {short} times short")
    return short


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1]), int(sys.argv[2]))))
