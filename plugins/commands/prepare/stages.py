"""The stages that worker processes run: read and filter documents into shards, and tokenize them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.utils.files import replacing

from .fast_bpe import FastEncoder
from .filter import Dropped, TokenLimits, make_filters
from .pool import CorpusStage
from .reader import Reader, Task
from .shards import CorpusShard, batches, key_of
from .sources import InputSource
from .stats import Counts, size_of


@dataclass
class FilterStage(CorpusStage[tuple[int, Task], dict[str, Any]]):
    """Read a task of the source with a given index, filter its documents, and write those that stay to a shard."""

    folder: Path
    sources: list[InputSource]
    clean: list[dict[str, Any]]  # the filters as plain data
    drop_unusable: bool
    ignore_columns: list[str]
    readers: dict[int, Reader] = field(default_factory=dict)

    def open(self) -> None:
        self.filters = make_filters(self.clean)

    def shard(self, source: int, task: Task) -> CorpusShard:
        """Return the shard of a task. Its name depends on everything that affects its content."""
        options = {name: value for name, value in self.sources[source].options.items() if name != "path"}
        rules = [self.clean, self.drop_unusable, self.ignore_columns]
        return CorpusShard(self.folder, key_of(3, self.sources[source].reader, options, rules, task.key))

    def __call__(self, item: tuple[int, Task]) -> dict[str, Any]:
        source, task = item
        shard = self.shard(source, task)
        if (done := shard.finished()) is not None:
            return done
        if source not in self.readers:
            self.readers[source] = self.sources[source].open()
        counts = Counts(self.ignore_columns)
        self.readers[source].drops = counts.rows if self.drop_unusable else None
        return shard.write(self._kept(self.readers[source], task, counts), {"counts": counts.plain})

    def _kept(self, reader: Reader, task: Task, counts: Counts) -> Iterator[tuple[bytes, str]]:
        for document in reader.usable(reader.read(task)):
            counts.rows.row(document.source, document.unread)
            text: str = document.text
            if not text or text.isspace():
                counts.plain["blank"] += 1
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


@dataclass
class TokenizeStage(CorpusStage[tuple[CorpusShard, np.ndarray | None], dict[str, Any]]):
    """Tokenize the documents of a shard that a mask keeps (None: all), and filter them by their token counts."""

    folder: Path
    tokenizer: Path
    dtype: np.dtype
    clean: list[dict[str, Any]]  # the filters as plain data
    min_tokens: int
    alone: bool  # this is the only working process, so it may use all cores

    def open(self) -> None:
        if not self.alone:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each of the other cores has its own process
        tokenizer = load_tokenizer(self.tokenizer)
        self.encoder, self.end = FastEncoder(tokenizer), tokenizer.end_id
        self.filters = make_filters(self.clean)
        if self.min_tokens:
            self.filters.append(("min_tokens", TokenLimits(None, self.min_tokens)))

    def __call__(self, item: tuple[CorpusShard, np.ndarray | None]) -> dict[str, Any]:
        texts, mask = item
        shard = CorpusShard(self.folder, key_of(texts.key, None if mask is None else np.packbits(mask).tobytes().hex()))
        if (done := shard.finished()) is not None:
            return done
        counts, sizes = Counts(), []
        sources = iter(texts.sources() if mask is None else compress(texts.sources(), mask))
        with replacing(shard.path("bin")) as file:
            for batch in batches(texts.texts(mask)):
                for text, ids in zip(batch, self.encoder.encode(batch), strict=True):
                    if self._keeps(text, len(ids), next(sources), counts):
                        tokens = np.empty(len(ids) + 1, self.dtype)
                        tokens[:-1], tokens[-1] = ids, self.end
                        file.write(tokens.data)
                        sizes.append(len(tokens))
        with replacing(shard.path("npy")) as file:
            np.save(file, np.array(sizes, "<i4"))
        return shard.finish({"counts": counts.plain, "key": shard.key}, "bin", "npy")

    def _keeps(self, text: str, length: int, source: str, counts: Counts) -> bool:
        size = size_of(text)
        counts.read(size)
        for name, filter in self.filters:
            if (dropped := filter.tokens(length)) is not None:
                counts.drop(name, size, source, dropped.reason, text)
                return False
        return True
