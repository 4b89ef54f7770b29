"""Run a function over many items on the machines of a Ray cluster, as `WorkerPool` does in processes of one."""

import os
import pickle
import platform
import re
import secrets
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from crosstrain.config.registry import registry
from crosstrain.corpus.options import PrepareOptions
from crosstrain.corpus.pool import CorpusStage, Item, Result, WorkerPool
from crosstrain.utils.errors import DataError, first_line
from crosstrain.utils.optional_deps import require

_TRIES = 4  # of an item whose worker or machine is lost; Ray makes them


class RayPool(WorkerPool):
    """Tasks of a Ray cluster, one for each item of one stage after another.

    An item whose worker or machine is lost is done again, and so may be done twice at the same time: a stage has to
    replace its files whole.
    """

    def __init__(self, options: PrepareOptions, folder: Path) -> None:
        """folder: of the work, which every machine has to see."""
        super().__init__(options.workers)
        self._address, self._mark = options.ray_address, folder.resolve() / f".{secrets.token_hex(8)}"

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
        self._mark.touch()
        return self

    def __exit__(self, *exception: object) -> None:
        self._mark.unlink(missing_ok=True)
        if self._ours:
            self._ray.shutdown()

    def size_for(self, little: bool) -> None:
        self.workers = self.given or max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def run(self, stage: CorpusStage[Item, Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield results in the order of the items; at most three items per worker are on their way.

        An exception of the stage is raised here; DataError for an item whose worker is lost time and again.
        """
        place = registry.folders(), os.getcwd(), self._mark
        # In a list Ray leaves it alone: a worker asks for it once.
        stored = [self._ray.put((place, pickle.dumps(stage)))]
        task = self._ray.remote(num_cpus=1, max_retries=_TRIES - 1, scheduling_strategy="SPREAD")(_work)
        name = secrets.token_hex(8)
        try:
            yield from self.results(lambda item: task.remote(name, stored, item).future(), items)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            raise DataError(
                f"workers died {_TRIES} times over the same part of the input, perhaps for want of memory"
                f" ({first_line(error)}): run the same command again to go on where it stopped, or with fewer workers"
            ) from None


_stages: dict[str, CorpusStage[Any, Any]] = {}  # the one that is open in this worker, by name


def _work(name: str, stored: list[Any], item: Any) -> Any:
    """Do an item on some machine. DataError if the leading process's files are not there."""
    if name not in _stages:
        (folders, working, mark), data = require("ray", "engine: ray").get(stored[0])
        if not mark.exists() or not Path(working).is_dir():
            raise DataError(
                f"{mark.parent} or {working} is not there on {platform.node()}: engine: ray needs a file system that"
                " all machines of the cluster see"
            )
        os.chdir(working)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have their own tasks
        for label, folder in folders:
            registry.add_folder(folder, label)
        stage = pickle.loads(data)
        stage.open()
        _stages.clear()
        _stages[name] = stage
    return _stages[name](item)
