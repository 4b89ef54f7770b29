"""The stages that worker processes run: read and filter documents into shards, and tokenize them."""

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain import Chunk, FileReader, TextTokenizer, load_tokenizer

from .filter import Dropped, Filter, make_filters
from .shards import CorpusShard, file_state, key_of
from .sources import InputSource
from .stats import Counts


@dataclass
class _Stage:
    folder: Path
    clean: list[dict[str, Any]]  # name and options of each filter, as in the recipe

    @cached_property
    def filters(self) -> list[tuple[str, Filter]]:
        return make_filters(self.clean)


@dataclass
class FilterStage(_Stage):
    """Read tasks of the sources, filter their documents, and write the remaining documents to one shard per task."""

    sources: list[InputSource]
    drop_unusable: bool
    ignore_columns: list[str]

    @cached_property
    def readers(self) -> list[FileReader]:
        return [source.open() for source in self.sources]

    def __call__(self, item: tuple[int, list[Chunk]]) -> tuple[int, int, CorpusShard, dict[str, Any]]:
        """Process a task; return the number of the source, the size in bytes, the shard, and the shard's counts."""
        number, task = item
        source, reader = self.sources[number], self.readers[number]
        size = sum(chunk.stop - chunk.start for chunk in task)
        options = {name: value for name, value in source.options.items() if name != "path"}
        rules = [self.clean, self.drop_unusable, self.ignore_columns]
        states = [[*file_state(chunk.file), chunk.start, chunk.stop] for chunk in task]
        shard = CorpusShard(self.folder, key_of(5, source.reader, options, rules, states))
        if (done := shard.finished()) is not None:
            return number, size, shard, done["counts"]
        counts = Counts(self.ignore_columns)
        reader.drops = counts.rows if self.drop_unusable else None
        report: dict[str, Any] = {"counts": counts.plain, "lengths": [], "hashes": [], "sources": []}
        with shard.writing(report) as file:
            for document in reader.read(task):
                counts.rows.row(document.source, document.unread)
                text = document.text
                if not text or text.isspace():
                    counts.plain["blank"] += 1
                    continue
                length = len(text.encode())
                counts.read(length)
                for name, filter in self.filters:
                    outcome = filter.text(text)
                    if isinstance(outcome, Dropped):
                        counts.drop(name, length, document.source, outcome.reason, text)
                        break
                    text = outcome
                else:
                    data = text.encode()
                    file.write(data)
                    report["lengths"].append(len(data))
                    report["hashes"].append(hashlib.blake2b(data, digest_size=16).hexdigest())
                    report["sources"].append(document.source)
        return number, size, shard, counts.plain


@dataclass
class TokenizeStage(_Stage):
    """Tokenize the documents of a shard, except the dropped ones, and filter them by their token counts."""

    tokenizer: Path
    dtype: np.dtype

    @cached_property
    def encoder(self) -> TextTokenizer:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # other workers use the other cores
        return load_tokenizer(self.tokenizer)

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
                tokens, size = self.encoder.encode(text), len(text.encode())
                counts.read(size)
                for name, filter in self.filters:
                    if (dropped_by := filter.tokens(len(tokens))) is not None:
                        counts.drop(name, size, source, dropped_by.reason, text)
                        break
                else:
                    file.write(np.array([*tokens, self.encoder.end_id], self.dtype).data)
                    report["lengths"].append(len(tokens) + 1)
        return shard, report
