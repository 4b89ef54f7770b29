"""Tokenize: each shard of documents becomes one of tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain.corpus.fast_bpe import FastEncoder
from crosstrain.corpus.filter import TokenLimits, make_filters
from crosstrain.corpus.pool import CorpusStage
from crosstrain.corpus.shards import TextShard, key_of
from crosstrain.corpus.stats import Counts, size_of
from crosstrain.data.tokenizer import load_tokenizer

_BATCH_CHARACTERS = 1 << 20  # enough for every core to have work, small enough to hold several times over

Kept = tuple[str, np.ndarray | None]  # a shard of documents, and a mask of those that are not repeated


class TokenShard(TextShard):
    """A shard of tokens: NAME.bin, with the length of each document in NAME.npy and the counts in NAME.json."""

    def sizes(self) -> np.ndarray:
        """Return the tokens of each document with its end-of-text token, int32 [documents]."""
        return np.load(self.path("npy"), allow_pickle=False)


@dataclass
class TokenizeStage(CorpusStage[Kept, dict[str, Any]]):
    """Tokenize the kept documents of a shard, and apply the filters on lengths. Finished shards stay."""

    texts: Path
    folder: Path
    tokenizer: Path
    dtype: np.dtype
    clean: list[dict[str, Any]]  # the filters as plain data
    min_tokens: int
    alone: bool  # no other process works, so all cores may be used

    def open(self) -> None:
        if not self.alone:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have their own process
        tokenizer = load_tokenizer(self.tokenizer)
        self.encoder, self.end = FastEncoder(tokenizer), tokenizer.end_id
        self.filters = make_filters(self.clean)
        if self.min_tokens:
            self.filters.append(("min_tokens", TokenLimits(None, self.min_tokens)))

    def __call__(self, kept: Kept) -> dict[str, Any]:
        name, mask = kept
        shard = TokenShard(self.folder, key_of(name, None if mask is None else np.packbits(mask).tobytes().hex()))
        if (done := shard.finished()) is not None:
            return done
        counts, sizes = Counts(), []
        with open(shard.path("bin"), "wb") as file:
            for text, source, ids in self._encoded(TextShard(self.texts, name), mask):
                if self._keeps(text, len(ids), source, counts):
                    tokens = np.empty(len(ids) + 1, self.dtype)
                    tokens[:-1], tokens[-1] = ids, self.end
                    file.write(tokens.data)
                    sizes.append(len(tokens))
        np.save(shard.path("npy"), np.array(sizes, "<i4"))
        return shard.finish({"counts": counts.plain, "key": shard.key}, "bin", "npy")

    def _encoded(self, shard: TextShard, mask: np.ndarray | None) -> Iterator[tuple[str, str, np.ndarray]]:
        sources = iter(shard.sources() if mask is None else compress(shard.sources(), mask))
        for texts in batches(shard.texts(mask)):
            yield from zip(texts, islice(sources, len(texts)), self.encoder.encode(texts), strict=True)

    def _keeps(self, text: str, length: int, source: str, counts: Counts) -> bool:
        size = size_of(text)
        counts.read(size)
        for name, filter in self.filters:
            if (dropped := filter.tokens(length)) is not None:
                counts.drop(name, size, source, dropped.reason, text)
                return False
        return True


def batches(texts: Iterator[str], characters: int = _BATCH_CHARACTERS) -> Iterator[list[str]]:
    """Yield lists of documents of about `characters` characters, reading no further ahead."""
    batch: list[str] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= characters:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
