"""Measure what a step costs with concatenated embeddings, compared with a sum.

The clients' widths add up to the same number for both heads: 8, 32, 128 and 32 for the concatenation, four
times 50 for the sum. Both heads are of the same kind and have ten outputs. The head on the sum multiplies 50
numbers per row, the other one 200, and the table reads four times as many numbers. So a ratio of 1 is out of
reach. A step that did more for each column than it has to would exceed the target.
"""

from collections.abc import Callable, Sequence
from time import process_time

import numpy as np
import torch
from torch import nn

from benchmarks.harness import REPEATS, Figure, benchmark, interleave, ratios
from benchmarks.server_step import BATCH, filled_table
from vafl.models.heads import linear
from vafl.models.losses import softmax
from vafl.models.tabular import TabularHead
from vafl.protocol.descent import Descent
from vafl.protocol.messages import Upload
from vafl.protocol.rules import Rule
from vafl.protocol.schedule import BatchSchedule
from vafl.protocol.server import Server
from vafl.protocol.stepsizes import constant
from vafl.run.assembly import limited_threads

WIDTHS, EQUAL_WIDTHS = (8, 32, 128, 32), (50, 50, 50, 50)
OUTPUTS, HIDDEN, STEPS = 10, (64,), 16
ROWS = 500_000
RATIO = 1.5

MakeHead = Callable[[int], nn.Module]


@benchmark(target=RATIO)
@limited_threads(1)
def concat_step_ratio() -> Figure:
    """Linear heads: a step with widths 8, 32, 128 and 32 over one with the sum of four embeddings of 50.

    The detail has the times, and the same ratio for a table that fits into the cache and for tabular heads.
    """
    concat, summed = _times(ROWS, lambda inputs: linear(inputs, OUTPUTS))
    detail = {"concat_us": _microseconds(concat), "sum_us": _microseconds(summed)}
    for name, rows, make in (
        ("small_table", 10_000, lambda inputs: linear(inputs, OUTPUTS)),
        ("tabular_head", ROWS, lambda inputs: TabularHead(inputs, OUTPUTS, HIDDEN)),
    ):
        seconds = _times(rows, make)
        detail[f"{name}_ratio"] = round(Figure(ratios(*seconds)).quartiles[1], 3)
        detail |= {
            f"{name}_{kind}_us": _microseconds(taken)
            for kind, taken in zip(("concat", "sum"), seconds, strict=True)
        }
    return Figure(ratios(concat, summed), detail)


def _times(rows: int, make_head: MakeHead) -> tuple[list[float], list[float]]:
    """Return the seconds of STEPS steps with concatenated and with summed embeddings."""
    torch.manual_seed(0)
    concat = _server(rows, WIDTHS, make_head(sum(WIDTHS)), summed=False)
    summed = _server(rows, EQUAL_WIDTHS, make_head(EQUAL_WIDTHS[0]), summed=True)
    first, second = interleave(_steps(concat), _steps(summed), clock=process_time)
    return first, second


def _microseconds(seconds: list[float]) -> float:
    return round(Figure(seconds).quartiles[1] / STEPS * 1e6, 1)


def _server(rows: int, widths: Sequence[int], head: nn.Module, *, summed: bool) -> Server:
    table = filled_table(rows, widths, summed=summed)
    labels = np.random.default_rng(1).integers(OUTPUTS, size=rows)
    return Server(table, labels, head, softmax, Descent(head.parameters(), constant(0.01)), Rule(1))


def _steps(server: Server) -> Callable[[], None]:
    """Return a function that makes STEPS steps, each with a new upload. Clients take turns."""
    table, generator = server.table, np.random.default_rng(2)
    schedules = [BatchSchedule("iid", table.rows, BATCH, seed=0, stream=m) for m in range(table.clients)]
    uploads = []
    for number in range(STEPS * (REPEATS + 1)):
        activation, client = divmod(number, table.clients)
        embeddings = generator.random((BATCH, table.widths[client]), np.float32)
        uploads.append(
            Upload(client, activation, activation, schedules[client].batch(activation), embeddings)
        )
    waiting = iter(uploads)

    def run() -> None:
        for _ in range(STEPS):
            server.receive(next(waiting))

    return run
