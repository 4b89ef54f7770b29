"""Reading and cleaning: each task of the input to one shard of documents, with a count of what became of all."""

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
    """A task, which of the sources it is of, and the name of its shard."""

    source: int
    task: Task | None  # None: its shard is finished
    key: str


@dataclass
class Filtered:
    """All shards in the order of the input, and what became of each input's documents."""

    shards: list[TextShard]
    counts: dict[str, Counts]
    accounts: dict[str, dict[str, int]]  # what each input's fetching has to tell


@dataclass
class FilterStage(CorpusStage[FilterItem, dict[str, Any]]):
    """Reads a task, puts its documents through the rules, and writes those that are left. Finished shards stay."""

    folder: Path
    sources: list[InputSource]
    clean: list[dict[str, Any]]  # the rules as plain data
    readers: dict[int, Reader] = field(default_factory=dict)

    def open(self) -> None:
        self.rules = make_filters(self.clean)

    def key(self, source: int, task: Task) -> str:
        """The name of a task's shard: another one as soon as anything that decides its content changes."""
        options = {name: value for name, value in self.sources[source].options.items() if name != "path"}
        return key_of(2, self.sources[source].reader, options, self.clean, task.key)

    def __call__(self, work: FilterItem) -> dict[str, Any]:
        shard = TextShard(self.folder, work.key)
        if (done := shard.finished()) is not None:
            return done
        assert work.task is not None
        if work.source not in self.readers:
            self.readers[work.source] = self.sources[work.source].open()
        counts = Counts()
        return shard.write(self._kept(self.readers[work.source], work.task, counts), {"counts": counts.plain})

    def _kept(self, reader: Reader, task: Task, counts: Counts) -> Iterator[tuple[bytes, str]]:
        for document in reader.read(task):
            text: str = document.text
            if not text or text.isspace():
                counts.blank()
                continue
            size = size_of(text)
            counts.read(size)
            for name, rule in self.rules:
                outcome = rule.text(text)
                if isinstance(outcome, Dropped):
                    counts.drop(name, size, document.source, outcome.why, text)
                    break
                if outcome is not text and outcome != text:
                    counts.change(name, document.source, text, outcome)
                    text = outcome
            else:
                yield text.encode(), document.source
