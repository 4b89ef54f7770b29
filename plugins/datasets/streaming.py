"""Stream shards without an index or a copy, for data that is too large to store."""

import logging
import tarfile
from collections.abc import Iterator
from itertools import count, groupby
from typing import TypeVar

import numpy as np

from crosstrain import DataError, ReadContext, derive_seed
from crosstrain.utils.files import open_regular

from .webdataset import is_remote, local_path, members, open_remote

log = logging.getLogger(__name__)

T = TypeVar("T")
_Sample = tuple[str, dict[str, bytes]]  # ("SHARD: KEY", extension -> content)
_CHUNK = 1 << 20


class ShardStream:
    """Endless samples of this reader's share of the shards, in passes, each in a new order.

    Every worker process of every rank is a reader. Each pass shuffles all shards, with a seed derived from the run's
    seed, the run's first sample and the index of the pass, and distributes them over the readers. Each reader shuffles
    its samples in a buffer of `buffer` samples, which it empties at the end of the pass. If a shard cannot be read to
    its end, the rest of it is skipped, and `lost` has shard name -> reason. Raises DataError if there are fewer shards
    than readers. Iteration raises DataError if more than the fraction `max_lost` of all shards is lost, or if a pass
    has no sample.
    """

    def __init__(
        self, names: list[str], context: ReadContext, worker: int, workers: int, buffer: int, max_lost: float
    ) -> None:
        self.names, self.buffer, self.max_lost = names, buffer, max_lost
        self.reader, self.readers = context.rank * workers + worker, context.size * workers
        self.seed = derive_seed(context.seed, "shards", context.start)
        self.lost: dict[str, str] = {}
        if len(names) < self.readers:
            raise DataError(
                f"{len(names)} shards cannot be streamed by {self.readers} readers ({context.size} ranks with "
                f"{workers} loading processes each): use as many shards, fewer of run.num_workers, or streaming=false"
            )

    def __iter__(self) -> Iterator[_Sample]:
        rng = np.random.default_rng([self.seed, self.reader])
        for number in count():
            found = False
            for sample in mixed(self._pass(number), self.buffer, rng):
                found = True
                yield sample
            if not found:
                raise DataError(f"no sample could be read from {self._share(number)[0]} and what else was read with it")

    def _share(self, number: int) -> list[str]:
        """Return the names of this reader's shards in a pass."""
        order = np.random.default_rng(derive_seed(self.seed, "pass", number)).permutation(len(self.names))
        return [self.names[i] for i in order[self.reader :: self.readers]]

    def _pass(self, number: int) -> Iterator[_Sample]:
        for name in self._share(number):
            try:
                yield from read_shard(name)
            except (tarfile.TarError, OSError, ValueError) as error:  # webdataset reports a failed pipe as an OSError
                self._lose(name, " ".join(str(error).split()))

    def _lose(self, name: str, reason: str) -> None:
        self.lost[name] = reason
        log.warning("the rest of the shard %s is skipped: %s", name, reason)
        if len(self.lost) > self.max_lost * len(self.names):
            raise DataError(
                f"{name} cannot be read to its end ({reason}), which is one of {len(self.lost)} shards among "
                f"{len(self.names)}, more than the share max_skipped={self.max_lost}"
            )


def read_shard(name: str) -> Iterator[_Sample]:
    """Yield the samples of a shard, compressed or not, in order. Raises tarfile.TarError or OSError.

    TarError is also raised if the members of a sample are not adjacent, because reading them needs an index.
    """
    seen = set[str]()
    with open_remote(name) if is_remote(name) else open_regular(local_path(name)) as stream:
        with tarfile.open(fileobj=stream, mode="r|*") as tar:
            for key, run in groupby(members(tar), key=lambda found: found[0]):
                if key in seen:
                    raise tarfile.TarError(f"the members of {key} are apart: sort the shard, or set streaming=false")
                seen.add(key)
                files = ((extension, tar.extractfile(member)) for _, extension, member in run)
                yield f"{name}: {key}", {extension: file.read() for extension, file in files if file}
        while stream.read(_CHUNK):  # a command fails if its output is not read to the end
            pass


def mixed(items: Iterator[T], size: int, rng: np.random.Generator) -> Iterator[T]:
    """Yield each item once, shuffled in a buffer of `size` items."""
    waiting: list[T] = []
    for item in items:
        if len(waiting) < size:
            waiting.append(item)
        else:
            place = int(rng.integers(size))
            waiting[place], item = item, waiting[place]
            yield item
    yield from (waiting[i] for i in rng.permutation(len(waiting)))
