"""Read and filter: each task of the input becomes a shard of documents, with counts of what was kept and dropped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosstrain.corpus.filter import Dropped, make_filters
from crosstrain.corpus.pool import CorpusStage
from crosstrain.corpus.reader import Reader, Task
from crosstrain.corpus.shards import TextShard, key_of
from crosstrain.corpus.sources import InputSource
from crosstrain.corpus.stats import Counts, size_of


@dataclass(frozen=True)
class FilterItem:
    """A task, the number of its source, and the name of its shard."""

    source: int
    task: Task | None  # None: its shard is finished
    key: str


@dataclass
class FilterStage(CorpusStage[FilterItem, dict[str, Any]]):
    """Read a task, filter its documents, and write those that are left. Finished shards stay."""

    folder: Path
    sources: list[InputSource]
    clean: list[dict[str, Any]]  # the filters as plain data
    readers: dict[int, Reader] = field(default_factory=dict)

    def open(self) -> None:
        self.filters = make_filters(self.clean)

    def key(self, source: int, task: Task) -> str:
        """Return the name of a task's shard, which changes with everything that decides its content."""
        options = {name: value for name, value in self.sources[source].options.items() if name != "path"}
        return key_of(2, self.sources[source].reader, options, self.clean, task.key)

    def __call__(self, item: FilterItem) -> dict[str, Any]:
        shard = TextShard(self.folder, item.key)
        if (done := shard.finished()) is not None:
            return done
        assert item.task is not None
        if item.source not in self.readers:
            self.readers[item.source] = self.sources[item.source].open()
        counts = Counts()
        return shard.write(self._kept(self.readers[item.source], item.task, counts), {"counts": counts.plain})

    def _kept(self, reader: Reader, task: Task, counts: Counts) -> Iterator[tuple[bytes, str]]:
        for document in reader.read(task):
            text: str = document.text
            if not text or text.isspace():
                counts.blank()
                continue
            size = size_of(text)
            counts.read(size)
            for name, filter in self.filters:
                outcome = filter.text(text)
                if isinstance(outcome, Dropped):
                    counts.drop(name, size, document.source, outcome.reason, text)
                    break
                if outcome is not text and outcome != text:
                    counts.change(name, document.source, text, outcome)
                    text = outcome
            else:
                yield text.encode(), document.source
