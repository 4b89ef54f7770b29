"""The stages from input to tokens: read and filter, find duplicates, train a tokenizer, tokenize, write.

Each stage works on shards in a folder that outlives the process. The name of a shard depends on its input and its
options, so a later run finds finished work by name even if the earlier run was killed.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from crosstrain import DataError
from crosstrain.config.schema import to_plain
from crosstrain.data.tokenizer import TextTokenizer, load_tokenizer, warn_if_rebuilt
from crosstrain.utils.errors import printable

from ...datasets.indexed_dataset import TokenWriter, best_dtype
from ...datasets.prepared import FORMAT_VERSION, Summary, hash_of
from .dedup import Duplicates, find_duplicates
from .filter import make_filters
from .options import PrepareOptions
from .pool import WorkerPool
from .reader import Task
from .shards import CorpusShard, key_of
from .sources import sources
from .stages import FilterStage, TokenizeStage
from .stats import BINS, Counts, histogram, write_report
from .train_bpe import train_bpe

_SMALL = 16 << 20  # bytes; for smaller inputs, starting processes takes longer than the work
_log = logging.getLogger(__name__)


def build(options: PrepareOptions, folder: Path, progress: bool) -> Summary:
    """Make the dataset in `folder`/out, and reuse the finished work of earlier calls in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with WorkerPool(options.workers) as pool:
        return _Pipeline(options, folder, progress, pool).run()


class _Pipeline:
    def __init__(self, options: PrepareOptions, folder: Path, progress: bool, pool: WorkerPool) -> None:
        self.options, self.folder, self.progress, self.pool = options, folder, progress, pool
        self.filters = [to_plain(component) for component in options.clean]
        make_filters(self.filters)  # report mistakes before any work is done
        self.given = load_tokenizer(options.tokenizer) if options.tokenizer is not None else None
        warn_if_rebuilt(options.tokenizer or "")
        self.sources = sources(options.input, {"text_key": options.text_key, "separator": options.separator})
        self.shards: list[CorpusShard] = []  # filtered documents, in input order

    def run(self) -> Summary:
        inputs = self._filter()
        duplicates = Duplicates(None, {})
        if self.options.dedup is not None:
            with self._bar("find repeated documents", None, " documents") as bar:
                duplicates = find_duplicates(self.options.dedup, self.shards, self.folder, self.pool, bar.update)
        folder = self._tokenizer(duplicates)
        tokenizer = load_tokenizer(folder)
        dtype = best_dtype(tokenizer.vocab_size)
        tokenized, late = self._tokenize(duplicates, folder, dtype)
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        lengths = np.zeros(BINS, np.int64)
        with TokenWriter(out / "tokens", dtype) as writer, self._bar("write", len(tokenized)) as bar:
            for shard in tokenized:
                sizes = shard.rows()
                writer.append(sizes, shard.path("bin"))
                lengths += histogram(sizes - 1)
                bar.update()
        shutil.copytree(folder, out / "tokenizer")
        documents = sum(counts["documents"] for counts in inputs.values())
        summary = Summary(
            format_version=FORMAT_VERSION,
            documents=writer.num_documents,
            dropped=documents - writer.num_documents,
            tokens=writer.num_tokens,
            text_bytes=sum(counts["bytes"] for counts in inputs.values()),
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.end_id,
            dtype=dtype.name,
            tokenizer_sha256=hash_of(out / "tokenizer" / "tokenizer.json"),
            options=self.options.plain,
        )
        text_sizes = np.sum([histogram(shard.rows()["length"]) for shard in self.shards], axis=0)
        write_report(out, inputs, duplicates.report, late.plain, tokens=lengths, bytes=text_sizes)
        summary.write(out)
        for path in (file for file in out.rglob("*") if file.is_file()):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        return summary

    def _filter(self) -> dict[str, dict[str, Any]]:
        """Fill `shards`, and return a dict from the label of each input to its counts."""
        folder = self.folder / "clean"
        folder.mkdir(parents=True, exist_ok=True)
        # The workers do not need the lists of files, and these may be long.
        stage = FilterStage(
            folder,
            [replace(source, files=None) for source in self.sources],
            self.filters,
            self.options.unusable != "error",
            self.options.ignore_columns,
        )
        readers = [source.open() for source in self.sources]
        for reader in readers:
            reader.fetch(Path(self.options.downloads or self.folder / "fetched").expanduser(), self.progress)
        totals = [reader.size() for reader in readers]
        counts = {source.label: Counts(self.options.ignore_columns) for source in self.sources}
        handed_out: list[tuple[str, int]] = []  # (label, bytes) of each task

        def items() -> Iterator[tuple[int, Task]]:
            for number, (source, reader) in enumerate(zip(self.sources, readers, strict=True)):
                for task in reader.tasks():
                    self.shards.append(stage.shard(number, task))
                    handed_out.append((source.label, task.size))
                    yield number, task

        first, rest, size = [], items(), 0
        while size <= _SMALL and (item := next(rest, None)) is not None:
            first.append(item)
            size += handed_out[-1][1]
        self.pool.size_for(size <= _SMALL)
        with self._bar("read and clean", None if None in totals else sum(size or 0 for size in totals), "B") as bar:
            for place, report in enumerate(self.pool.run(stage, chain(first, rest))):
                label, size = handed_out[place]
                counts[label].add(report["counts"])
                bar.update(size)
        for label, found in counts.items():
            found.rows.check(label, self.options.max_dropped)
            for notice in found.rows.notices():
                _log.warning("%s: %s", printable(label), notice)
            if not found.kept:
                raise DataError(f"{label} holds no document: {found.all_dropped()}")
        inputs = {label: found.plain for label, found in counts.items()}
        for source, reader in zip(self.sources, readers, strict=True):
            if reader.fetch_counts:
                inputs[source.label] = inputs[source.label] | {"fetched": reader.fetch_counts}
        return inputs

    def _tokenizer(self, duplicates: Duplicates) -> Path:
        """Return the folder of the given tokenizer, or of a tokenizer trained on the remaining documents."""
        if self.given is not None:
            key = key_of(self.given.backend.to_str())
        else:
            key = key_of([shard.key for shard in self.shards], duplicates.digest, self.options.train_tokenizer)
        folder = self.folder / f"tokenizer-{key}"
        if not folder.exists():
            (self.given or self._trained(duplicates)).save(folder.with_suffix(".new"))
            folder.with_suffix(".new").rename(folder)
        return folder

    def _trained(self, duplicates: Duplicates) -> TextTokenizer:
        wanted = self.options.train_tokenizer
        assert wanted is not None
        texts = chain.from_iterable(shard.texts(mask) for shard, mask in duplicates.left(self.shards))
        tokenizer = train_bpe(texts, wanted, self.progress)
        if (size := tokenizer.vocab_size) < wanted:
            hint = "a model's vocab_size need not be larger"
            _log.warning("the text is too short for a vocabulary of %d: the tokenizer has %d; %s", wanted, size, hint)
        return tokenizer

    def _tokenize(self, duplicates: Duplicates, tokenizer: Path, dtype: np.dtype) -> tuple[list[CorpusShard], Counts]:
        key = key_of(tokenizer.name, dtype.name, self.filters, self.options.min_tokens)
        folder = self.folder / f"tokens-{key}"
        folder.mkdir(exist_ok=True)
        alone = self.pool.workers == 1
        stage = TokenizeStage(folder, tokenizer, dtype, self.filters, self.options.min_tokens, alone)
        shards, counts = [], Counts()
        with self._bar("tokenize", len(self.shards)) as bar:
            for report in self.pool.run(stage, duplicates.left(self.shards)):
                counts.add(report["counts"])
                shards.append(CorpusShard(folder, report["key"]))
                bar.update()
        if not counts.kept:
            raise DataError(f"nothing is left of {self.options.input}: {counts.all_dropped()}")
        return shards, counts

    def _bar(self, title: str, total: int | None, unit: str = " shards") -> tqdm:
        return tqdm(desc=title, total=total, unit=unit, unit_scale=unit == "B", disable=not self.progress)
