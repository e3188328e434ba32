"""Measure how the time of a server's step grows with the rows of its table and with the clients.

A step is one `Server.receive` of a prepared upload: check, store, evaluate, answer. None of its work grows
with rows or clients. But the cells of a large table come from memory instead of the processor's caches. So
the target is at most twice the time. Work that grew with the rows or the clients would exceed it by far.
"""

from collections.abc import Callable, Sequence
from time import process_time

import numpy as np

from benchmarks.harness import REPEATS, Figure, benchmark, interleave, ratios
from vafl.models.heads import Bias
from vafl.models.losses import softmax
from vafl.protocol.descent import Descent
from vafl.protocol.messages import Upload
from vafl.protocol.rows import in_parts
from vafl.protocol.rules import Rule
from vafl.protocol.schedule import BatchSchedule
from vafl.protocol.server import Server
from vafl.protocol.stepsizes import constant
from vafl.protocol.table import EmbeddingTable
from vafl.run.assembly import limited_threads

BATCH, WIDTH, STEPS = 600, 10, 64
FILL_ROWS = 1 << 18
FLAT = 2.0


@benchmark(target=FLAT)
@limited_threads(1)
def server_step_growth_rows() -> Figure:
    """4 clients: a table of 10^7 rows over one of 10^4.

    The detail has the time of a bare read of the same number of rows. For rows far apart, it is the time that
    the processor needs to find their pages and fetch their cache lines.
    """
    sizes = [10**7, 10**4, 10**5, 10**6]
    servers = [_server(rows, clients=4) for rows in sizes]
    seconds = interleave(*map(_steps, servers), clock=process_time)
    reading = interleave(*map(_reads, servers), clock=process_time)
    growth = {f"rows_{rows}_us": _microseconds(taken) for rows, taken in zip(sizes, seconds, strict=True)}
    growth |= {f"read_{rows}_us": _microseconds(taken) for rows, taken in zip(sizes, reading, strict=True)}
    return Figure(ratios(seconds[0], seconds[1]), growth)


@benchmark(target=FLAT)
@limited_threads(1)
def server_step_growth_clients() -> Figure:
    """60,000 rows: the time with 40 clients over that with 4."""
    servers = [_server(60_000, clients) for clients in (40, 4)]
    many, few = interleave(*map(_steps, servers), clock=process_time)
    return Figure(
        ratios(many, few), {"clients_40_us": _microseconds(many), "clients_4_us": _microseconds(few)}
    )


def _microseconds(seconds: list[float]) -> float:
    return round(Figure(seconds).quartiles[1] / STEPS * 1e6, 1)


def _steps(server: Server) -> Callable[[], None]:
    """Return a function that makes STEPS steps of a server with a full table, each with a new upload."""
    rows, clients = server.table.rows, server.table.clients
    schedules = [BatchSchedule("iid", rows, BATCH, seed=0, stream=client) for client in range(clients)]
    uploads = iter([_upload(schedules, number) for number in range(STEPS * (REPEATS + 1))])

    def run() -> None:
        for _ in range(STEPS):
            server.receive(next(uploads))

    return run


def _reads(server: Server) -> Callable[[], None]:
    """Return a function that reads STEPS batches of the same table and does nothing else."""
    schedule = BatchSchedule("iid", server.table.rows, BATCH, seed=1, stream=0)
    batches = iter([schedule.batch(number) for number in range(STEPS * (REPEATS + 1))])

    def run() -> None:
        for _ in range(STEPS):
            server.table.read(next(batches))

    return run


def _server(rows: int, clients: int) -> Server:
    table, head = filled_table(rows, [WIDTH] * clients, summed=True), Bias(WIDTH)
    labels = np.random.default_rng(1).integers(WIDTH, size=rows)  # like real labels
    return Server(table, labels, head, softmax, Descent(head.parameters(), constant(0.1)), Rule(1))


def filled_table(rows: int, widths: Sequence[int], *, summed: bool) -> EmbeddingTable:
    """Return a table with random embeddings in all cells."""
    table, generator = EmbeddingTable(rows, widths, summed=summed), np.random.default_rng(0)
    for client, width in enumerate(widths):
        for part in in_parts(np.arange(rows), FILL_ROWS):
            table.store(client, part, generator.random((len(part), width), np.float32), 0)
    return table


def _upload(schedules: Sequence[BatchSchedule], number: int) -> Upload:
    """Return the upload with this number. Clients take turns."""
    activation, client = divmod(number, len(schedules))
    embeddings = np.random.default_rng(number).random((BATCH, WIDTH), np.float32)
    return Upload(client, activation, activation, schedules[client].batch(activation), embeddings)
