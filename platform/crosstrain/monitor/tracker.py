"""Trackers: the interface for plugins that record a run's metrics, and a wrapper that isolates their errors."""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from crosstrain.config.registry import registry
from crosstrain.config.schema import Component
from crosstrain.monitor.metrics import Row
from crosstrain.utils.errors import UserError, sentence
from crosstrain.utils.logging import log

_MAX_BACKLOG = 1000  # maximum number of waiting rows of a slow tracker; further rows are dropped
_CLOSE_SECONDS = 30.0  # time that a slow tracker has for the remaining rows after training


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker follows."""

    folder: Path  # the run's folder; a tracker writes files to its own subfolder
    config: dict[str, Any]  # resolved, as in config.yaml
    resumed_step: int  # training continues after this step; 0: it starts from the beginning

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def remembered(self, tracker: str, make: Callable[[], str]) -> str:
        """Return the ID of this run at a tracker, from TRACKER/run_id in the run's folder.

        The file is created on the first start, with the ID that `make` returns.
        """
        file = self.folder / tracker / "run_id"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_text(make(), encoding="utf-8")
        return file.read_text(encoding="utf-8").strip()


class Tracker(ABC):
    """Base class of all trackers. `run.trackers: [{name: ..., <Options>}]` chooses and configures trackers.

    Each tracker is created on rank 0 when training begins. If a tracker raises an error, training continues, and only
    this tracker loses the row. The tracker still gets later rows. Only the first error is logged.
    """

    remote = False  # True: calls may be slow, for example over a network, and run in a separate thread

    @classmethod  # noqa: B027 - most trackers need nothing
    def check(cls, options: Any) -> None:
        """Raise UserError if something is missing, such as a package or a login. Called before any worker exists."""

    def __init__(self, options: Any, run: TrackedRun) -> None:
        self.options, self.run = options, run

    @abstractmethod
    def log(self, row: Row) -> None:
        """Record the metrics of a step, of a validation, or of both. `crosstrain.monitor.metrics` lists a row's keys.

        A resumed run repeats the steps after its checkpoint, with the same step numbers.
        """

    def close(self, finished: bool) -> None:  # noqa: B027 - some trackers keep nothing open
        """Finish recording; called when training ends. `finished` is True if training reached its last step."""

    def place(self) -> str | None:
        """Return a file, an address or a command to view the metrics, for the final output of a run."""
        return None


def check_trackers(components: Iterable[Component]) -> None:
    """Raise UserError for a tracker that cannot work as configured. Called before any worker exists."""
    for component in components:
        try:
            registry.get("tracker", component.name).check(component.options)
        except UserError as error:
            raise type(error)(f"run.trackers: {error}") from error


class IsolatedTracker:
    """A wrapper that keeps a tracker from stopping or delaying the run; an error affects only the tracker's rows.

    Calls of a remote tracker run in order, in a separate thread.
    """

    def __init__(self, component: Component, run: TrackedRun) -> None:
        self.name, cls = component.name, registry.get("tracker", component.name)
        self.place: str | None = None
        self._make = partial(cls, component.options, run)
        self._tracker: Tracker | None = None
        self._warned = False
        self._work: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_MAX_BACKLOG)
        self._thread: threading.Thread | None = None
        if cls.remote:
            self._thread = threading.Thread(target=self._run, name=f"tracker {self.name}", daemon=True)
            self._thread.start()
        self.call(lambda _: None)

    def call(self, work: Callable[[Tracker], None]) -> None:
        """Call `work` with the tracker, now or, for a remote tracker, in a separate thread."""
        if self._thread is None:
            return self._do(work)
        try:
            self._work.put_nowait(work)
        except queue.Full:
            self._warn(f"is more than {_MAX_BACKLOG} rows behind; training continues, and rows are lost")

    def _do(self, work: Callable[[Tracker], None]) -> None:
        """Call `work` with the tracker, after creating the tracker if it does not exist yet."""
        try:
            self._tracker = self._tracker or self._make()
            self.place = self._tracker.place()
            work(self._tracker)
        except Exception as error:
            self._warn(f"failed ({type(error).__name__}: {error}); training continues, and later rows are still sent")

    def _warn(self, problem: str) -> None:
        """Log the tracker's first problem."""
        if not self._warned:
            self._warned = True
            log.warning("%s", sentence(f"run.trackers: {self.name} {problem}"))

    def join(self) -> None:
        """Wait until the calls are done. A thread that takes too long is abandoned."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._work.put(None, timeout=_CLOSE_SECONDS)
                self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                self._warned = False
                self._warn(f"did not accept the last rows within {_CLOSE_SECONDS:.0f} s; some may be missing")

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._do(work)
