"""Run a function on many items in worker processes: ordered results, bounded memory, one error if a worker dies."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from crosstrain import DataError, registry
from crosstrain.utils.processes import Bond, main_hidden

Item = TypeVar("Item")
Result = TypeVar("Result")

_stages: list[Callable[[Any], Any]] = []  # the stage of this worker process


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_stage(stage: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Yield results in the order of the items; at most three items per worker are in memory.

    workers: number of processes; 1: run everything in this process. Each worker receives a pickled copy of the stage,
    so attributes that cannot be pickled must be cached properties. If the stage raises an exception, it is raised
    here after the running items finish. Raises DataError if a worker dies.
    """
    if workers <= 1:
        yield from map(stage, items)
        return
    # Spawn, because fork would copy locks that other threads hold.
    executor = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _begin, (registry.folders(), Bond(), stage)
    )
    running = deque[Future[Result]]()
    try:
        for item in items:
            with main_hidden():
                running.append(executor.submit(_work, item))
            if len(running) >= 3 * workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process died, perhaps because it ran out of memory: run the same command again to continue where"
            " it stopped, with fewer workers if it dies again"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(folders: list[tuple[str, Path]], _bond: Bond, stage: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides when to stop
    for label, folder in folders:
        registry.add_folder(folder, label)
    _stages.append(stage)


def _work(item: Any) -> Any:
    return _stages[0](item)
