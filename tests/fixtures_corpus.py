"""The documents of inputs, read in this process as `crosstrain prepare` reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crosstrain_plugins.builtin.commands.prepare import reader, sources
from crosstrain_plugins.builtin.commands.prepare.shards import CorpusShard

from crosstrain.config.schema import Component


def documents(given: sources.Input, **settings: Any) -> Iterator[reader.Document]:
    for source in sources.sources(given, settings):
        each = source.open()
        for task in each.tasks():
            yield from each.read(task)


def read(*given: Path | str | Component, key: str = "text", separator: str | None = None) -> list[str]:
    """Return the texts of inputs that are not blank."""
    named = [each if isinstance(each, Component) else str(each) for each in given]
    found = documents(named, text_key=key, separator=separator)
    return [document.text for document in found if document.text and not document.text.isspace()]


def write_shard(folder: Path, key: str, documents: list[tuple[str, str]]) -> CorpusShard:
    """Write a shard of (text, source)."""
    folder.mkdir(parents=True, exist_ok=True)
    shard = CorpusShard(folder, key)
    texts = [text.encode() for text, _ in documents]
    report = {
        "counts": {}, "lengths": [len(text) for text in texts], "sources": [source for _, source in documents],
        "hashes": [hashlib.blake2b(text, digest_size=16).hexdigest() for text in texts],
    }  # fmt: skip
    with shard.writing(report) as file:
        file.writelines(texts)
    return shard
