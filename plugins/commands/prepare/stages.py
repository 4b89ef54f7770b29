"""The stages that worker processes run: read and filter documents into shards, and tokenize them."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain.data.tokenizer import load_tokenizer

from .filter import Dropped, make_filters
from .pool import CorpusStage
from .reader import Chunk, FileReader, task_key
from .shards import CorpusShard, key_of
from .sources import InputSource
from .stats import Counts


@dataclass
class FilterStage(CorpusStage[tuple[int, list[Chunk], CorpusShard], dict[str, Any]]):
    """Read a task of the source with a given index, filter its documents, and write those that stay to a shard."""

    folder: Path
    sources: list[InputSource]
    clean: list[dict[str, Any]]  # the filters as plain data
    drop_unusable: bool
    ignore_columns: list[str]
    readers: dict[int, FileReader] = field(default_factory=dict)

    def open(self) -> None:
        self.filters = make_filters(self.clean)

    def shard(self, source: int, task: list[Chunk]) -> CorpusShard:
        """Return the shard of a task. Its name depends on everything that affects its content."""
        options = {name: value for name, value in self.sources[source].options.items() if name != "path"}
        rules = [self.clean, self.drop_unusable, self.ignore_columns]
        return CorpusShard(self.folder, key_of(4, self.sources[source].reader, options, rules, task_key(task)))

    def __call__(self, item: tuple[int, list[Chunk], CorpusShard]) -> dict[str, Any]:
        """Return the shard's counts."""
        source, task, shard = item
        if (done := shard.finished()) is not None:
            return done["counts"]
        if source not in self.readers:
            self.readers[source] = self.sources[source].open()
        counts = Counts(self.ignore_columns)
        self.readers[source].drops = counts.rows if self.drop_unusable else None
        report: dict[str, Any] = {"counts": counts.plain, "lengths": [], "hashes": [], "sources": []}
        with shard.writing(report) as file:
            for text, place in self._kept(self.readers[source], task, counts):
                file.write(text)
                report["lengths"].append(len(text))
                report["hashes"].append(hashlib.blake2b(text, digest_size=16).hexdigest())
                report["sources"].append(place)
        return counts.plain

    def _kept(self, reader: FileReader, task: list[Chunk], counts: Counts) -> Iterator[tuple[bytes, str]]:
        for document in reader.read(task):
            counts.rows.row(document.source, document.unread)
            text: str = document.text
            if not text or text.isspace():
                counts.plain["blank"] += 1
                continue
            size = len(text.encode())
            counts.read(size)
            for name, filter in self.filters:
                outcome = filter.text(text)
                if isinstance(outcome, Dropped):
                    counts.drop(name, size, document.source, outcome.reason, text)
                    break
                text = outcome
            else:
                yield text.encode(), document.source


@dataclass
class TokenizeStage(CorpusStage[tuple[CorpusShard, list[int]], tuple[CorpusShard, dict[str, Any]]]):
    """Tokenize the documents of a shard, except those at the given places, and filter them by their token counts."""

    folder: Path
    tokenizer: Path
    dtype: np.dtype
    clean: list[dict[str, Any]]  # the filters as plain data

    def open(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each of the other cores has its own process
        self.encoder, self.filters = load_tokenizer(self.tokenizer), make_filters(self.clean)

    def __call__(self, item: tuple[CorpusShard, list[int]]) -> tuple[CorpusShard, dict[str, Any]]:
        """Return the shard of tokens and its report."""
        texts, dropped = item
        shard = CorpusShard(self.folder, key_of(texts.key, dropped))
        if (done := shard.finished()) is not None:
            return shard, done
        counts = Counts()
        report: dict[str, Any] = {"counts": counts.plain, "lengths": []}
        with shard.writing(report) as file:
            for text, source in texts.documents(set(dropped)):
                tokens = self.encoder.encode(text)
                if self._keeps(text, len(tokens), source, counts):
                    file.write(np.array([*tokens, self.encoder.end_id], self.dtype).data)
                    report["lengths"].append(len(tokens) + 1)
        return shard, report

    def _keeps(self, text: str, length: int, source: str, counts: Counts) -> bool:
        size = len(text.encode())
        counts.read(size)
        for name, filter in self.filters:
            if (dropped := filter.tokens(length)) is not None:
                counts.drop(name, size, source, dropped.reason, text)
                return False
        return True
