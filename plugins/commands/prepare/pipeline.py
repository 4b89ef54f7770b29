"""The stages from input to tokens: read and filter, find duplicates, train a tokenizer, tokenize, write.

Each stage works on shards in a folder that outlives the process. The name of a shard depends on its input and its
options, so a later run finds finished work by name even if the earlier run was killed.
"""

import shutil
from collections import Counter
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from crosstrain import DataError, TextTokenizer, load_tokenizer, log, printable, to_plain, write_json
from crosstrain.checkpoint.files import fsync
from crosstrain.data.tokenizer import warn_if_rebuilt

from ...datasets.indexed_dataset import TokenWriter, best_dtype
from ...datasets.prepared import FORMAT_VERSION, Summary, hash_of
from .dedup import find_duplicates
from .filter import make_filters
from .options import PrepareOptions
from .pool import cores, run_stage
from .shards import CorpusShard, key_of
from .sources import sources
from .stages import FilterStage, TokenizeStage
from .stats import Counts, bins
from .train_bpe import train_bpe

_SMALL = 16 << 20  # bytes; for smaller inputs, starting processes takes longer than the work


class Pipeline:
    """Makes a dataset in `folder`/out, and reuses the finished work of earlier pipelines in `folder`."""

    def __init__(self, options: PrepareOptions, folder: Path, progress: bool) -> None:
        self.options, self.folder, self.progress = options, folder, progress
        self.filters = [to_plain(component) for component in options.clean]
        make_filters(self.filters)  # report mistakes before any work is done
        self.given = load_tokenizer(options.tokenizer) if options.tokenizer is not None else None
        warn_if_rebuilt(options.tokenizer or "")
        self.sources = sources(options.input, {"text_key": options.text_key, "separator": options.separator})
        self.readers = [source.open() for source in self.sources]
        for reader in self.readers:
            reader.fetch(Path(options.downloads or folder / "fetched").expanduser(), progress)
        sizes = [reader.size() for reader in self.readers]
        self.total = None if None in sizes else sum(size or 0 for size in sizes)  # bytes of input; None: unknown
        self.workers = options.workers or (1 if self.total is not None and self.total <= _SMALL else cores())
        self.shards: list[CorpusShard] = []  # filtered documents, in input order

    def run(self) -> Summary:
        """Make the dataset."""
        inputs = self._filter()
        dropped, repeated = [list[int]() for _ in self.shards], dict[str, Any]()
        if self.options.dedup is not None:
            with self._bar("find repeated documents", None, " documents") as bar:
                dropped, repeated = find_duplicates(self.options.dedup, self.shards, self.workers, bar.update)
        folder = self._tokenizer(dropped)
        tokenizer = load_tokenizer(folder)
        dtype = best_dtype(tokenizer.vocab_size)
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        tokens = self.folder / f"tokens-{key_of(folder.name, dtype.name, self.filters)}"
        tokens.mkdir(exist_ok=True)
        stage = TokenizeStage(tokens, self.filters, folder, dtype)
        counts, lengths = Counts(), {"tokens": Counter[int](), "bytes": Counter[int]()}
        with TokenWriter(out / "tokens", dtype) as writer, self._bar("tokenize", len(self.shards)) as bar:
            for shard, report in run_stage(stage, zip(self.shards, dropped, strict=True), self.workers):
                writer.append(np.array(report["lengths"], np.int64), shard.path)
                lengths["tokens"].update((length - 1).bit_length() for length in report["lengths"])
                counts.add(report["counts"])
                bar.update()
        if not counts.kept:
            raise DataError(f"no documents are left of {self.options.input}: {counts.all_dropped()}")
        shutil.copytree(folder, out / "tokenizer")
        summary = Summary(
            format_version=FORMAT_VERSION,
            documents=writer.num_documents,
            dropped=sum(each["documents"] for each in inputs.values()) - writer.num_documents,
            tokens=writer.num_tokens,
            text_bytes=sum(each["bytes"] for each in inputs.values()),
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.end_id,
            dtype=dtype.name,
            tokenizer_sha256=hash_of(out / "tokenizer" / "tokenizer.json"),
            options=self.options.plain,
        )
        for texts in self.shards:
            lengths["bytes"].update(length.bit_length() for length in texts.report()["lengths"])
        write_json(
            out / "report.json",
            {
                "inputs": inputs,
                "repeated": repeated,
                "tokenized": counts.plain,
                "lengths": {unit: bins(sums) for unit, sums in lengths.items()},
            },
        )
        write_json(out / "dataset.json", asdict(summary))
        for path in (file for file in out.rglob("*") if file.is_file()):
            fsync(path)
        return summary

    def _filter(self) -> dict[str, dict[str, Any]]:
        """Fill `shards`, and return a dict from the label of each input to its counts."""
        folder = self.folder / "clean"
        folder.mkdir(parents=True, exist_ok=True)
        # The lists of files may be long, and workers do not need them.
        stage = FilterStage(
            folder,
            self.filters,
            [replace(source, files=None) for source in self.sources],
            self.options.unusable != "error",
            self.options.ignore_columns,
        )
        counts = {source.label: Counts(self.options.ignore_columns) for source in self.sources}
        tasks = ((number, task) for number, reader in enumerate(self.readers) for task in reader.tasks())
        with self._bar("read and clean", self.total, "B") as bar:
            for number, size, shard, found in run_stage(stage, tasks, self.workers):
                self.shards.append(shard)
                counts[self.sources[number].label].add(found)
                bar.update(size)
        for label, sums in counts.items():
            sums.rows.check(label, self.options.max_dropped)
            for notice in sums.rows.notices():
                log.warning("%s: %s", printable(label), notice)
            if not sums.kept:
                raise DataError(f"{label} holds no document: {sums.all_dropped()}")
        inputs = {label: sums.plain for label, sums in counts.items()}
        for source, reader in zip(self.sources, self.readers, strict=True):
            if reader.fetch_counts:
                inputs[source.label] = inputs[source.label] | {"fetched": reader.fetch_counts}
        return inputs

    def _tokenizer(self, dropped: list[list[int]]) -> Path:
        """Return the folder of the given tokenizer, or of a tokenizer trained on the remaining documents."""
        key = (
            key_of([shard.key for shard in self.shards], dropped, self.options.train_tokenizer)
            if self.given is None
            else key_of(self.given.backend.to_str())
        )
        folder = self.folder / f"tokenizer-{key}"
        if not folder.exists():
            (self.given or self._trained(dropped)).save(folder.with_suffix(".new"))
            folder.with_suffix(".new").rename(folder)
        return folder

    def _trained(self, dropped: list[list[int]]) -> TextTokenizer:
        wanted = self.options.train_tokenizer
        assert wanted is not None
        kept = (shard.documents(set(places)) for shard, places in zip(self.shards, dropped, strict=True))
        tokenizer = train_bpe((text for text, _ in chain.from_iterable(kept)), wanted, self.progress)
        if (size := tokenizer.vocab_size) < wanted:
            log.warning(
                "the text is too short for a vocabulary of %d: the tokenizer has %d; a model's vocab_size need not be "
                "larger",
                wanted,
                size,
            )
        return tokenizer

    def _bar(self, title: str, total: int | None, unit: str = " shards") -> tqdm:
        return tqdm(desc=title, total=total, unit=unit, unit_scale=unit == "B", disable=not self.progress)
