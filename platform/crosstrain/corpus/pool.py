"""A function over many items in worker processes: results in order, few items at a time, clear deaths."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from crosstrain.config.registry import registry
from crosstrain.utils.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")
_Named = tuple[int, bytes]  # number of a stage, and the stage as `pickle` wrote it in this run


class CorpusStage(ABC, Generic[Item, Result]):
    """What is done to each item. It goes to a worker with each one, so it is small; `open` makes the rest."""

    def open(self) -> None:
        """Called once in each process that works, before the first item."""

    @abstractmethod
    def __call__(self, item: Item) -> Result:
        """The result for an item. It should leave nothing in memory."""


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool:
    """Processes that do one stage after another. With one worker everything is done in this process.

    A context manager: the processes begin when there is work for them, and end with the block.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._stages = 0
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def run(self, stage: CorpusStage[Item, Result], items: Iterable[Item]) -> Iterator[Result]:
        """Results in the order of the items, of which at most three per worker are held.

        An exception of the stage is raised here once the items begun are finished; DataError when a worker dies.
        """
        if self.workers <= 1:
            stage.open()
            yield from map(stage, items)
            return
        if self._executor is None:
            context = multiprocessing.get_context("spawn")  # a fork would copy the locks of whatever threads there are
            self._executor = ProcessPoolExecutor(self.workers, context, _begin, (registry.folders(),))
        self._stages += 1
        named = (self._stages, pickle.dumps(stage))
        try:
            yield from _in_order(self._executor, named, items, 3 * self.workers)
        except BrokenProcessPool:
            raise DataError(
                "a worker process died, perhaps for want of memory: run the same command again to go on where it"
                " stopped, with fewer workers if it dies again"
            ) from None


def _in_order(executor: ProcessPoolExecutor, stage: _Named, items: Iterable[Any], most: int) -> Iterator[Any]:
    begun: deque[Future[Any]] = deque()
    try:
        for item in items:
            begun.append(executor.submit(_work, stage, item))
            if len(begun) >= most:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        for future in begun:
            future.cancel()
        wait(begun)


_stages: dict[int, CorpusStage[Any, Any]] = {}  # in a worker: the one that is worked on


def _begin(folders: list[tuple[str, Path]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that leads says when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for label, folder in folders:
        registry.add_folder(folder, label)


def _end_with_parent() -> None:
    """Otherwise a worker whose parent was killed waits for ever, or writes where the next run does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _work(named: _Named, item: Any) -> Any:
    number, pickled = named
    if number not in _stages:
        _stages.clear()
        stage = pickle.loads(pickled)
        stage.open()
        _stages[number] = stage
    return _stages[number](item)
