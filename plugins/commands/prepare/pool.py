"""Run a function on many items in worker processes: ordered results, bounded memory, one error if a worker dies."""

import multiprocessing
import os
import pickle
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from crosstrain import DataError, registry
from crosstrain.utils.processes import Bond, main_hidden

Item = TypeVar("Item")
Result = TypeVar("Result")


class CorpusStage(ABC, Generic[Item, Result]):
    """A function of one item. Workers receive it pickled; `open` creates the objects that cannot be pickled."""

    def open(self) -> None:
        """Prepare this process; called once per process, before the first item."""

    @abstractmethod
    def __call__(self, item: Item) -> Result:
        """Return the result for an item, and keep no part of the item in memory."""


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool:
    """Processes that run stages one after the other. With one worker, everything runs in this process.

    The processes start with the first work. As a context manager, the pool ends them with the block.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def run(self, stage: CorpusStage[Item, Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield results in the order of the items; at most three items per worker are in memory.

        An exception of the stage is raised here after the running items finish. Raises DataError if a worker dies.
        """
        if self.workers <= 1:
            stage.open()
            yield from map(stage, items)
            return
        if self._executor is None:
            context = multiprocessing.get_context("spawn")  # fork would copy the locks of other threads
            self._executor = ProcessPoolExecutor(self.workers, context, _begin, (registry.folders(), Bond()))
        packed, running = pickle.dumps(stage), deque[Future[Result]]()
        try:
            for item in items:
                with main_hidden():
                    running.append(self._executor.submit(_work, packed, item))
                if len(running) >= 3 * self.workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool:
            raise DataError(
                "a worker process died, perhaps for want of memory: run the same command again to go on where it"
                " stopped, with fewer workers if it dies again"
            ) from None
        finally:
            for future in running:
                future.cancel()
            wait(running)


def _begin(folders: list[tuple[str, Path]], _bond: Bond) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides when to stop
    for label, folder in folders:
        registry.add_folder(folder, label)


@lru_cache(1)
def _stage(packed: bytes) -> CorpusStage[Any, Any]:
    stage = pickle.loads(packed)
    stage.open()
    return stage


def _work(packed: bytes, item: Any) -> Any:
    return _stage(packed)(item)
