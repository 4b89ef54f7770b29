"""The configured trackers of a run, none of which can stop it or hold it up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable

from crosstrain.config.registry import registry
from crosstrain.config.schema import Component
from crosstrain.monitor.metrics import Row
from crosstrain.monitor.tracker import TrackedRun, Tracker
from crosstrain.utils.errors import ConfigError, UserError, sentence
from crosstrain.utils.logging import log

_WAITING = 1000  # rows that a slow tracker may lag behind; further ones are lost for it
_PATIENCE = 30.0  # seconds that it may take to send the rest when training has ended


def check_trackers(components: Iterable[Component]) -> None:
    """Raise UserError for a tracker that cannot work as it is configured; no worker exists yet."""
    components = list(components)
    for number, component in enumerate(components):
        if component.name in (other.name for other in components[:number]):
            raise ConfigError(f"run.trackers: {component.name} is named twice")
        try:
            registry.get("tracker", component.name).check(component.options)
        except UserError as error:
            raise type(error)(f"run.trackers: {error}") from error


class Trackers:
    """Those of one run, in the order of the configuration."""

    def __init__(self, components: Iterable[Component], run: TrackedRun) -> None:
        self._guarded = [_start(component, run) for component in components]

    def log(self, row: Row) -> None:
        for tracker in self._guarded:
            tracker.call(lambda t: t.log(row))

    def close(self, finished: bool) -> None:
        for tracker in self._guarded:
            tracker.call(lambda t: t.close(finished))
        for tracker in self._guarded:
            tracker.join()

    def places(self) -> list[tuple[str, str]]:
        """(tracker, how to look at what it has) of those that are to be looked at; to be called after `close`."""
        return [(tracker.name, place) for tracker in self._guarded if (place := tracker.place)]


def _start(component: Component, run: TrackedRun) -> _Guarded:
    cls = registry.get("tracker", component.name)
    guarded = _Background if cls.remote else _Guarded
    return guarded(component.name, lambda: cls(component.options, run))


class _Guarded:
    """A tracker whose failures cost its own numbers and nothing else."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name = name
        self.place: str | None = None
        self._make = make
        self._tracker: Tracker | None = None
        self._warned = False
        self.call(lambda _: None)

    def call(self, work: Callable[[Tracker], None]) -> None:
        """Do it with the tracker, which is made if that has not succeeded before."""
        try:
            self._tracker = self._tracker or self._make()
            self.place = self._tracker.place()
            work(self._tracker)
        except Exception as error:
            self.warn(f"failed ({type(error).__name__}: {error}); training goes on, and it is offered what follows")

    def warn(self, what: str) -> None:
        """Say what is wrong with the tracker, the first time."""
        if not self._warned:
            self._warned = True
            log.warning("%s", sentence(f"run.trackers: {self.name} {what}"))

    def join(self) -> None:
        """Wait until it has done what it was asked to."""


class _Background(_Guarded):
    """One whose calls are made in a thread, in their order, which training does not wait for."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._work: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()
        super().__init__(name, make)

    def call(self, work: Callable[[Tracker], None]) -> None:
        try:
            self._work.put_nowait(work)
        except queue.Full:
            self.warn(f"is more than {_WAITING} rows behind; training goes on, and it loses rows")

    def join(self) -> None:
        try:
            self._work.put(None, timeout=_PATIENCE)
        except queue.Full:
            pass
        else:
            self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            self._warned = False
            self.warn(f"did not take the last rows within {_PATIENCE:.0f} s; it may lack them")

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            super().call(work)
