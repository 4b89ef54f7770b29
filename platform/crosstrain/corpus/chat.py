"""Render and tokenize conversations once, into a folder of the cache.

tokens.bin, tokens.idx  Megatron's format, a document per conversation, int32; a target is stored as ~id
places.txt              file and line of each
answers.bin             a byte for each: 1 where the answer is good, and 2 more where it is no half of a pair
report.json             how many were kept and dropped, and why
"""

import hashlib
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from crosstrain.corpus import io
from crosstrain.corpus.conversations import Row, conversation, preferences, rows
from crosstrain.corpus.download import download
from crosstrain.corpus.pool import CorpusStage, WorkerPool, cores
from crosstrain.corpus.prepare import new_folder, output_lock
from crosstrain.data.chat_template import ChatError, ChatTemplate, TrainOn
from crosstrain.data.indexed_dataset import TokenWriter
from crosstrain.utils import storage
from crosstrain.utils.errors import DataError, first_line
from crosstrain.utils.files import cache_folder, write_json
from crosstrain.utils.limited_process import LimitedProcess

_FORMAT = 3  # of the folder; another number makes it anew
_AT_ONCE = 256  # rows of a worker's item
_WORTH_WORKERS = 1 << 22  # bytes of conversations that take longer than it takes workers to start
_NAMED = 1000  # dropped rows in the report


@dataclass(frozen=True)
class ChatSource:
    """Conversations and how to render them."""

    paths: tuple[str, ...]  # files and folders
    tokenizer: Path  # a folder with a chat template
    train_on: TrainOn
    max_tokens: int  # of a conversation that a model may read
    drop_unusable: bool  # rows that cannot be used; False: the first is an error
    preferences: bool = False  # rows have answers that are good or bad; those of a pair follow each other


_Tokens = tuple[list[int], bool]  # of a conversation, targets as ~id, and whether its answer is good


@dataclass(frozen=True)
class _Encode(CorpusStage[tuple[tuple[Row | str, str], ...], list[tuple[str, list[_Tokens] | str]]]):
    """Render and tokenize rows: their places, with conversations or a reason."""

    source: ChatSource

    def open(self) -> None:
        global _template, _process
        _template = ChatTemplate(self.source.tokenizer)
        _process = LimitedProcess(self._read, "")

    def __call__(self, item: tuple[tuple[Row | str, str], ...]) -> list[tuple[str, list[_Tokens] | str]]:
        found = []
        for row, place in item:
            _process.name = f"{place}: the chat template or its tokenizer"
            found.append((place, _process(row)))
        return found

    def _read(self, row: Row | str) -> list[_Tokens] | str:
        if isinstance(row, str):
            return row
        try:
            found = preferences(row) if self.source.preferences else [(*conversation(row), True)]
            return [(self._tokens(messages, tools), good) for messages, tools, good in found]
        except ChatError as error:
            return str(error)
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:  # JSON may be anything
            return f"it is malformed ({first_line(error)})"

    def _tokens(self, messages: list[Row], tools: list[Any] | None) -> list[int]:
        encoded = _template.encode(messages, tools, self.source.train_on)
        if len(encoded.ids) < 2:
            raise ChatError("it has no token to be learned")
        if len(encoded.ids) - 1 > self.source.max_tokens:
            raise ChatError(f"it has {len(encoded.ids) - 1} tokens, and seq_length is {self.source.max_tokens}")
        return [~token if is_target else token for token, is_target in zip(encoded.ids, encoded.is_target, strict=True)]


_template: ChatTemplate  # of a worker
_process: LimitedProcess  # that renders by it


def check_inputs(paths: Iterable[str]) -> None:
    """Raise DataError where a file or folder of conversations is missing; what is in a bucket is not looked for."""
    for path in paths:
        if path != "docstrings" and not storage.is_url(path):
            io.existing(path)


def prepare_chat(source: ChatSource) -> Path:
    """Make the folder of a source unless it is in the cache; returns it.

    Raises DataError where no conversation can be used, or the first that cannot if none is to be dropped.
    """
    state = [
        _FORMAT, source.tokenizer.name, source.train_on, source.max_tokens, source.drop_unusable, source.preferences,
        *map(_state, source.paths),
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]
    folder = cache_folder("chat") / digest
    with output_lock(folder, wait=True):
        if not (folder / "report.json").exists():
            with new_folder(folder) as made:
                _write(made, source)
    return folder


def _write(folder: Path, source: ChatSource) -> None:
    reasons, named, places, answers = Counter[str](), list[str](), list[str](), bytearray()
    first = dict[str, str]()  # of each kind of reason, whose numbers may differ
    copies = folder / "copies"
    size = sum(entry[1] for path in source.paths for entry in _state(path))
    workers = cores() if size > _WORTH_WORKERS else 1
    with TokenWriter(folder / "tokens", "int32") as writer, WorkerPool(workers) as pool:
        given = rows(_near(path, copies) for path in source.paths)
        for results in pool.run(_Encode(source), iter(lambda: tuple(islice(given, _AT_ONCE)), ())):
            for where, found in results:
                place = where.removeprefix(f"{copies}/")
                if not isinstance(found, str):
                    for tokens, good in found:
                        writer.add([tokens])
                        answers.append(good + 2 * (len(found) == 1))
                        places.append(place)
                    continue
                if not source.drop_unusable:
                    raise DataError(f"{place}: {found}")
                kind = re.sub(r"\d+", "N", found)
                reasons[kind] += 1
                first.setdefault(kind, f"{place}: {found}")
                if len(named) < _NAMED:
                    named.append(f"{place}: {found}")
    shutil.rmtree(copies, ignore_errors=True)
    dropped = reasons.total()
    if not places:
        where = " and ".join(source.paths)
        why = (
            f"none of {dropped} conversations can be used; the first: {named[0]}"
            if named
            else "no conversation is there"
        )
        raise DataError(f"{where}: {why}")
    (folder / "places.txt").write_text("".join(f"{place}\n" for place in places), encoding="utf-8")
    (folder / "answers.bin").write_bytes(answers)
    kinds = [[count, first[kind]] for kind, count in reasons.most_common(100)]
    report = {"conversations": len(places), "dropped": dropped, "kinds": kinds, "named": named}
    write_json(folder / "report.json", report)


def dropped_rows(folder: Path) -> str:
    """Say how many conversations of a prepared folder are dropped, and why; nothing where all are there."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    dropped = report["dropped"]
    why = "; ".join(f"{count} such as {first}" for count, first in report["kinds"][:3])
    total = dropped + report["conversations"]
    return f"{dropped} of {total} conversations are dropped, {why}; see {folder / 'report.json'}" if dropped else ""


def _state(path: str) -> list[list[Any]]:
    """Names, sizes and times of the files at a path; of `docstrings`, Python's version."""
    if path == "docstrings":
        return [[sys.version, 0, 0]]
    if storage.is_url(path):
        try:
            return [[url, storage.size(url), storage.version(url)] for url in _objects(path)]
        except FileNotFoundError:
            raise DataError(f"the input {path} does not exist") from None
    root = Path(path).expanduser()
    files = sorted(file for file in root.rglob("*") if file.is_file()) if root.is_dir() else [root]
    return [[str(file), *(lambda s: (s.st_size, s.st_mtime_ns))(file.stat())] for file in files if file.exists()]


def _objects(url: str) -> list[str]:
    return [storage.join(url, name) for name in sorted(storage.files(url))] or [url]


def _near(path: str, folder: Path) -> str:
    """Copy what a URL names to a folder; returns its path there, or any other path as it is."""
    if not storage.is_url(path):
        return path
    for url in _objects(path):
        download(url, folder, False)
    return str(folder / path.partition("://")[2])
