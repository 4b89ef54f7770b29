"""The stages from input to tokens: read and clean, de-duplicate, train a tokenizer, tokenize, write.

Each works on shards in a folder that outlives the process. The name of a shard says what it was made of and how, so a
stage finds by name what it has done already, whatever ended it.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

from crosstrain.corpus.dedup import Duplicates, find_duplicates
from crosstrain.corpus.filter import make_filters, plain
from crosstrain.corpus.filter_stage import Filtered, FilterItem, FilterStage
from crosstrain.corpus.options import PrepareOptions
from crosstrain.corpus.pool import WorkerPool, cores
from crosstrain.corpus.shards import TextShard, key_of
from crosstrain.corpus.sources import sources
from crosstrain.corpus.stats import BINS, Counts, histogram, write_report
from crosstrain.corpus.tokenize_stage import TokenizeStage, TokenShard
from crosstrain.data.indexed_dataset import TokenWriter, best_dtype
from crosstrain.data.prepared import FORMAT_VERSION, Summary, hash_of
from crosstrain.data.tokenizer import load_tokenizer, train_bpe
from crosstrain.utils.errors import DataError

_LITTLE = 16 << 20  # bytes of input for which starting processes takes longer than working
_log = logging.getLogger(__name__)


def build(options: PrepareOptions, folder: Path, progress: bool) -> Summary:
    """Make the dataset in `folder`/out from the input and from what earlier calls left in `folder`."""
    with WorkerPool(options.workers or 1) as pool:
        return _Pipeline(options, folder, progress, pool).run()


class _Pipeline:
    def __init__(self, options: PrepareOptions, folder: Path, progress: bool, pool: WorkerPool) -> None:
        self.options, self.folder, self.progress, self.pool = options, folder, progress, pool
        self.rules = plain(options.clean)
        make_filters(self.rules)  # so that a mistake shows before any work
        self.given = load_tokenizer(options.tokenizer) if options.tokenizer is not None else None
        self.sources = sources(options.input, {"text_key": options.text_key, "separator": options.separator})

    def run(self) -> Summary:
        cleaned = self._clean()
        repeated = self._dedup(cleaned)
        tokenizer = self._tokenizer(cleaned, repeated)
        loaded = load_tokenizer(tokenizer)
        encode, shards, late = self._encode(cleaned, repeated, tokenizer, best_dtype(loaded.vocab_size))
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        lengths = np.zeros(BINS, np.int64)
        with TokenWriter(out / "tokens", encode.dtype) as writer, self._bar("write", len(shards)) as bar:
            for shard in shards:
                sizes = shard.sizes()
                writer.append(sizes, shard.path("bin"))
                lengths += histogram(sizes - 1)
                bar.update()
        shutil.copytree(tokenizer, out / "tokenizer")
        read = [counts.plain for counts in cleaned.counts.values()]
        documents = sum(counts["documents"] for counts in read)
        summary = Summary(
            format_version=FORMAT_VERSION,
            documents=writer.num_documents,
            dropped=documents - writer.num_documents,
            tokens=writer.num_tokens,
            text_bytes=sum(counts["bytes"] for counts in read),
            vocab_size=loaded.vocab_size,
            eod_id=loaded.end_id,
            dtype=encode.dtype.name,
            tokenizer_sha256=hash_of(out / "tokenizer" / "tokenizer.json"),
            options=self.options.plain,
        )
        inputs = {
            label: counts.plain | {"fetched": cleaned.accounts[label]} if cleaned.accounts[label] else counts.plain
            for label, counts in cleaned.counts.items()
        }
        sizes = np.sum([histogram(shard.rows()["length"]) for shard in cleaned.shards], axis=0)
        write_report(out, inputs, repeated.report, late.plain, tokens=lengths, bytes=sizes)
        summary.write(out)
        _sync(out)
        return summary

    # ---- stages

    def _clean(self) -> Filtered:
        stage = FilterStage(_made(self.folder / "clean"), [source.for_workers() for source in self.sources], self.rules)
        readers = [source.open() for source in self.sources]
        for reader in readers:
            reader.fetch(Path(self.options.downloads or self.folder / "fetched").expanduser(), self.progress)
        totals = [reader.size() for reader in readers]
        total = None if None in totals else sum(size or 0 for size in totals)
        sizes: list[int] = []
        accounts = {source.label: reader.account for source, reader in zip(self.sources, readers, strict=True)}
        cleaned = Filtered([], {source.label: Counts() for source in self.sources}, accounts)
        labels: list[str] = []

        def works() -> Iterator[FilterItem]:
            for number, (source, reader) in enumerate(zip(self.sources, readers, strict=True)):
                for task in reader.tasks():
                    shard = TextShard(stage.folder, stage.key(number, task))
                    cleaned.shards.append(shard)
                    labels.append(source.label)
                    sizes.append(task.size)
                    yield FilterItem(number, None if shard.finished() else task, shard.key)

        begun, waiting = [], works()
        while sum(sizes) <= _LITTLE and (work := next(waiting, None)) is not None:
            begun.append(work)
        self.pool.workers = self.options.workers or (cores() if sum(sizes) > _LITTLE else 1)
        with self._bar("read and clean", total, "B") as bar:
            for place, report in enumerate(self.pool.run(stage, chain(begun, waiting))):
                cleaned.counts[labels[place]].add(report["counts"])
                bar.update(sizes[place])
        for label, counts in cleaned.counts.items():
            if not counts.kept:
                raise DataError(f"{label} holds no document: {counts.all_dropped()}")
        return cleaned

    def _dedup(self, cleaned: Filtered) -> Duplicates:
        if self.options.dedup is None:
            return Duplicates(None, {})
        with self._bar("find repeated documents", None, " documents") as bar:
            return find_duplicates(self.options.dedup, cleaned.shards, self.folder, self.pool, bar.update)

    def _tokenizer(self, cleaned: Filtered, repeated: Duplicates) -> Path:
        """The folder of the tokenizer, made here from the name, or trained on what is left."""
        if self.given is not None:
            folder = self.folder / f"tokenizer-{key_of(self.given.backend.to_str())}"
            if not folder.exists():
                self.given.save(folder.with_suffix(".new"))
                folder.with_suffix(".new").rename(folder)
            return folder
        wanted = self.options.train_tokenizer
        assert wanted is not None
        keys = [shard.key for shard in cleaned.shards]
        folder = self.folder / f"tokenizer-{key_of(keys, repeated.digest, wanted)}"
        if not folder.exists():
            texts = chain.from_iterable(shard.texts(mask) for shard, mask in repeated.left(cleaned.shards))
            trained = train_bpe(texts, wanted, self.progress)
            trained.save(folder.with_suffix(".new"))
            folder.with_suffix(".new").rename(folder)
            if trained.vocab_size < wanted:
                _log.warning(
                    "the text is too short for a vocabulary of %d: the tokenizer has %d", wanted, trained.vocab_size
                )
        return folder

    def _encode(
        self, cleaned: Filtered, repeated: Duplicates, tokenizer: Path, dtype: np.dtype
    ) -> tuple[TokenizeStage, list[TokenShard], Counts]:
        how = key_of(tokenizer.name, dtype.name, self.rules, self.options.min_tokens)
        encode = TokenizeStage(
            cleaned.shards[0].folder, _made(self.folder / f"tokens-{how}"), tokenizer, dtype, self.rules,
            self.options.min_tokens, alone=self.pool.workers == 1,
        )  # fmt: skip
        shards, counts = [], Counts()
        kept = ((shard.key, mask) for shard, mask in repeated.left(cleaned.shards))
        with self._bar("tokenize", len(cleaned.shards)) as bar:
            for report in self.pool.run(encode, kept):
                counts.add(report["counts"])
                shards.append(TokenShard(encode.folder, report["key"]))
                bar.update()
        if not counts.kept:
            raise DataError(f"nothing is left of {self.options.input}: {counts.all_dropped()}")
        return encode, shards, counts

    def _bar(self, title: str, total: int | None, unit: str = " shards") -> tqdm:
        return tqdm(desc=title, total=total, unit=unit, unit_scale=unit == "B", disable=not self.progress)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _sync(folder: Path) -> None:
    for path in (file for file in folder.rglob("*") if file.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
