"""Measure why the worker chooses between the event loop and its thread (vafl.transport.grpc.worker).

Three federations do the same work in turns: one in the worker's thread, one on the event loop, and one where
the worker chooses.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.federation import Measured, Workload, federation
from benchmarks.harness import Figure, benchmark, ratios
from benchmarks.network import LOGISTIC

ROUNDS, SLICE_SECONDS = 9, 1.5
DEEP = Workload(
    2,
    16,
    {
        "schedule": {"batch_size": 600, "refresh": "none"},
        "model": {"head": "mlp", "width": 512, "head_hidden": [1024, 1024]},
        "optimiser": {"step_size": 0.01},
    },
)


@benchmark(target=1.1, better="higher")
def worker_choice_small() -> Figure:
    """Updates per second of logistic regression with 4 clients: the worker's choice over the thread alone."""
    with _three(LOGISTIC) as measure:
        rounds = [measure() for _ in range(ROUNDS)]
    rates = {place: [each[place].rate for each in rounds] for place in rounds[0]}
    detail: dict[str, Any] = {place: Figure(samples).summary() for place, samples in rates.items()}
    detail["over_the_loop"] = Figure(ratios(rates["adaptive"], rates["loop"])).summary()
    return Figure(ratios(rates["adaptive"], rates["thread"]), detail)


@benchmark(target=0.5)
def worker_choice_deep() -> Figure:
    """The longest block of the server's event loop with a deep head: the choice over the loop alone."""
    with _three(DEEP) as measure:
        rounds = [measure() for _ in range(ROUNDS)]
    blocked = {place: [each[place].blocked for each in rounds] for place in rounds[0]}
    detail: dict[str, Any] = {
        place: {
            "blocked_seconds": Figure(samples).summary(),
            "updates_per_second": Figure([each[place].rate for each in rounds]).summary(),
        }
        for place, samples in blocked.items()
    }
    return Figure(ratios(blocked["adaptive"], blocked["loop"]), detail)


@contextmanager
def _three(workload: Workload) -> Iterator[Callable[[], dict[str, Measured]]]:
    """Start one federation for each place; yield a function that measures each of them once."""
    limit = int(3 * ROUNDS * SLICE_SECONDS)
    with ExitStack() as started:
        work = {
            place: started.enter_context(federation(replace(workload, place=place), limit))
            for place in ("adaptive", "thread", "loop")
        }

        def measure() -> dict[str, Measured]:
            return {place: slice_of(SLICE_SECONDS) for place, slice_of in work.items()}

        yield measure
