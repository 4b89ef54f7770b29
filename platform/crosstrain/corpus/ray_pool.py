"""Run a function over many items on the machines of a Ray cluster, as `WorkerPool` does in processes of one."""

import itertools
import os
import pickle
import platform
import re
import secrets
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from crosstrain.config.registry import registry
from crosstrain.corpus.options import PrepareOptions
from crosstrain.corpus.pool import CorpusStage, Item, Result, WorkerPool
from crosstrain.utils.errors import DataError, first_line
from crosstrain.utils.optional_deps import require

_PER_WORKER = 3  # items in memory
_DEATHS = 3  # times the number of workers that may die without a result between


class RayPool(WorkerPool):
    """Actors of a Ray cluster that run one stage after another.

    An item whose actor or machine is lost is submitted again, to another actor, and a new actor is started. An item may
    so run twice, even at the same time: a stage has to replace its files whole.
    """

    def __init__(self, options: PrepareOptions, folder: Path) -> None:
        """folder: of the work, which every machine has to see."""
        super().__init__(options.workers)
        self._address, self._mark = options.ray_address, folder.resolve() / f".{secrets.token_hex(8)}"
        self._starting: dict[Any, Any] = {}  # by the reference that is ready when the actor is
        self._load: dict[Any, int] = {}  # actor -> number of its items
        self._gone = set[Any]()
        self._numbers = itertools.count()  # of stages
        self._deaths = 0  # of workers since the last result

    def __enter__(self) -> Self:
        self._ray = require("ray", "engine: ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ours = not self._ray.is_initialized()
        if self._ours:
            try:
                if found := re.fullmatch(r"([^:/]+):(\d+)", self._address or ""):  # or Ray tries for minutes
                    socket.create_connection((found[1], int(found[2])), timeout=10).close()
                self._ray.init(address=self._address, log_to_driver=False, logging_level="ERROR")
            except (OSError, ValueError, RuntimeError) as error:
                raise DataError(f"ray_address: no Ray cluster can be joined ({first_line(error)})") from None
        self._actor = self._ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(_Worker)
        self._mark.touch()
        return self

    def __exit__(self, *exception: object) -> None:
        self._mark.unlink(missing_ok=True)
        for actor in [*self._load, *self._starting.values()]:
            self._ray.kill(actor)
        if self._ours:
            self._ray.shutdown()

    def size_for(self, little: bool) -> None:
        self.workers = self.given or max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def run(self, stage: CorpusStage[Item, Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield results in the order of the items; at most three items per worker are in memory.

        An exception of the stage is raised here; DataError where workers die time and again without a result.
        """
        number, data = next(self._numbers), [self._ray.put(pickle.dumps(stage))]
        new = enumerate(items)
        waiting, flight = deque[tuple[int, Item]](), dict[Any, tuple[Any, tuple[int, Item]]]()
        done, wanted = dict[int, Result](), 0
        try:
            while True:
                held = len(waiting) + len(flight) + len(done)
                waiting.extend(itertools.islice(new, _PER_WORKER * self.workers - held))
                if not waiting and not flight:
                    return
                while len(self._load) + len(self._starting) < self.workers:
                    actor = self._actor.remote()
                    self._starting[actor.begin.remote(registry.folders(), os.getcwd(), self._mark)] = actor
                while waiting and (actor := self._least_loaded()) is not None:
                    self._load[actor] += 1
                    flight[actor.run.remote(number, data, waiting[0][1])] = actor, waiting.popleft()
                [ready], _ = self._ray.wait([*flight, *self._starting], num_returns=1)
                try:
                    result = self._ray.get(ready)
                except self._ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except self._ray.exceptions.RayError as error:
                    if (actor := self._starting.pop(ready, None)) is None:
                        actor, work = flight.pop(ready)
                        waiting.appendleft(work)
                    self._deaths += self._dismiss(actor)
                    if self._deaths > _DEATHS * self.workers:
                        raise DataError(
                            f"workers died {self._deaths} times without a result between, perhaps for want of memory"
                            f" ({first_line(error)}): run the same command again to go on where it stopped, with fewer"
                            " workers if it happens again"
                        ) from None
                    continue
                if (actor := self._starting.pop(ready, None)) is not None:
                    self._load[actor] = 0
                    continue
                actor, (place, _) = flight.pop(ready)
                done[place], self._deaths = result, 0
                if actor in self._load:
                    self._load[actor] -= 1
                while wanted in done:
                    yield done.pop(wanted)
                    wanted += 1
        finally:
            for actor in {actor for actor, _ in flight.values()}:  # what they do is not wanted any more
                self._dismiss(actor)

    def _least_loaded(self) -> Any:
        """Return the actor with the fewest items; None if all have as many as they may."""
        free = (actor for actor, items in self._load.items() if items < _PER_WORKER)
        return min(free, key=self._load.__getitem__, default=None)

    def _dismiss(self, actor: Any) -> bool:
        """Make sure that an actor, which may only seem lost, does nothing more; False if that was done before."""
        self._ray.kill(actor)
        self._load.pop(actor, None)
        new = actor not in self._gone
        self._gone.add(actor)
        return new


class _Worker:
    """The actor: one process on one machine."""

    _number: int | None = None  # of the stage that is open

    def begin(self, folders: list[tuple[str, Path]], working: str, mark: Path) -> None:
        """Enter the leading process's working directory and find its plugins. DataError if its files are not here."""
        if not mark.exists() or not Path(working).is_dir():
            raise DataError(f"{mark.parent} or {working} is not there on {platform.node()}: engine: ray needs a file"
                            " system that all machines of the cluster see")  # fmt: skip
        os.chdir(working)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have their own actors
        for label, folder in folders:
            registry.add_folder(folder, label)

    def run(self, number: int, data: list[Any], item: Any) -> Any:
        if number != self._number:
            ray = require("ray", "engine: ray")
            self._stage = pickle.loads(ray.get(data[0]))
            self._stage.open()
            self._number = number
        return self._stage(item)
