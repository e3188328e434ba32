"""Run many independent jobs of an experiment in several processes, with a progress bar."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import TypeVar

import torch
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_all(
    label: str,
    work: Callable[[Job], Result],
    jobs: Sequence[Job],
    cost: Callable[[Job], float] = lambda job: 1.0,
    workers: int = 1,
    tell: Callable[[Job, Result], str] | None = None,
) -> list[Result]:
    """Return the results of all jobs, in order.

    `cost` is a job's weight in the progress bar. `tell` describes a job's result in one line.
    """
    found: dict[int, Result] = {}
    with _progress() as progress:
        task = progress.add_task(label, total=sum(map(cost, jobs)))
        # The most expensive first, so that no long job runs alone at the end.
        order = sorted(range(len(jobs)), key=lambda index: -cost(jobs[index]))
        for index, result in _one_by_one(work, jobs, order, workers):
            found[index] = result
            progress.advance(task, cost(jobs[index]))
            if tell is not None:
                progress.console.print(tell(jobs[index], result), highlight=False, markup=False)
    return [found[index] for index in range(len(jobs))]


def _one_by_one(
    work: Callable[[Job], Result], jobs: Sequence[Job], order: Sequence[int], workers: int
) -> Iterator[tuple[int, Result]]:
    """Yield each job's number and result when it is done. The first error ends all jobs."""
    if workers == 1:
        yield from ((index, work(jobs[index])) for index in order)
        return
    # Spawned, not forked: a fork of a process in which torch has threads may hang.
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin_worker) as pool:
        futures = {pool.submit(work, jobs[index]): index for index in order}
        try:
            yield from ((futures[future], future.result()) for future in as_completed(futures))
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    """Use one thread for arithmetic, and start another one that ends this process, even during a run, if the
    parent process is killed."""
    torch.set_num_threads(1)

    def outlive_nobody() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    Thread(target=outlive_nobody, daemon=True).start()


def in_groups(results: Sequence[Result], size: int) -> list[list[Result]]:
    """Return the jobs in groups of `size` neighbours."""
    return [list(results[start : start + size]) for start in range(0, len(results), size)]


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread for arithmetic: small models are fastest so, even more beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
