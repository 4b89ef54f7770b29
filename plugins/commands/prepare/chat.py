"""Render and tokenize conversations once, into a cache folder.

tokens.bin, tokens.idx  Megatron's format, one document per conversation, int32; a target token is stored as ~id
places.txt              file and line of each conversation
answers.bin             one byte per conversation: 1 if the answer is good, plus 2 if it is not part of a pair
report.json             counts of kept and dropped rows, with reasons, and unread keys
"""

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from crosstrain import DataError, LimitedProcess, cache_folder, first_line, write_json
from crosstrain.utils import storage

from ...datasets.indexed_dataset import TokenWriter
from ...datasets.row_audit import RowAudit
from . import io
from .chat_template import ChatError, ChatTemplate, TrainOn, refuse_if
from .conversation_files import rows
from .conversations import Conversation, conversations
from .download import download
from .pool import cores, run_stage
from .prepare import make_once
from .shards import file_state, key_of

_FORMAT = 4  # version of the folder's files; changing it rebuilds all folders
_AT_ONCE = 256  # rows per work item
_WORTH_WORKERS = 1 << 22  # bytes of conversations; with fewer, starting workers takes longer than the work
# (conversations of a row, or the reason why the row is unusable; unread keys of the row). A conversation is
# (token IDs, with ~id for targets; whether the answer is good).
_Result = tuple[list[tuple[list[int], bool]] | str, set[str]]


@dataclass
class ChatSource:
    """Conversations and the options for rendering them. A call renders and tokenizes rows."""

    paths: tuple[str, ...]  # files and folders
    tokenizer: Path  # a folder with a chat template
    train_on: TrainOn
    max_tokens: int  # maximum length of a usable conversation
    preferences: bool = False  # rows have good and bad answers; the two answers of a pair are adjacent

    @cached_property
    def process(self) -> LimitedProcess:
        self.template = ChatTemplate(self.tokenizer)  # loaded before the process is forked
        return LimitedProcess(self._read, "")

    def __call__(self, item: tuple[tuple[io.Row | str, str], ...]) -> list[tuple[str, _Result]]:
        """Return (place, result) for each row."""
        found = []
        for row, place in item:
            self.process.name = f"{place}: the chat template or its tokenizer"
            found.append((place, self.process(row)))
        return found

    def _read(self, row: io.Row | str) -> _Result:
        if isinstance(row, str):
            return row, set()
        try:
            found, unread = conversations(row, self.preferences)
            return [(self._tokens(conversation, unread), conversation.is_good) for conversation in found], unread
        except ChatError as error:
            return str(error), set()
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:  # a row may have any content
            return f"it is malformed ({first_line(error)})", set()

    def _tokens(self, conversation: Conversation, unread: set[str]) -> list[int]:
        messages = [
            {key: value for key, value in turn if key in turn.model_fields_set} for turn in conversation.messages
        ]
        encoded = self.template.encode(messages, conversation.tools or None, self.train_on)
        unread |= encoded.unwritten
        length = len(encoded.ids) - 1
        refuse_if(length < 1, "it has no tokens to train on")
        refuse_if(length > self.max_tokens, f"it has {length} tokens, but seq_length is {self.max_tokens}")
        return [~token if is_target else token for token, is_target in zip(encoded.ids, encoded.is_target, strict=True)]


def check_inputs(paths: Iterable[str]) -> None:
    """Raise DataError if a local file or folder of conversations is missing; URLs are not checked."""
    for path in paths:
        if path != "docstrings" and not storage.is_url(path):
            io.existing(path)


def prepare_chat(source: ChatSource) -> Path:
    """Return the prepared folder of a source; create the folder if it is not in the cache.

    Raises DataError if no conversation can be used.
    """
    rules = [source.tokenizer.name, source.train_on, source.max_tokens, source.preferences]
    folder = cache_folder("chat") / key_of(_FORMAT, rules, *map(_state, source.paths))[:16]
    make_once(folder, partial(_write, source), last="report.json")
    return folder


def _write(source: ChatSource, folder: Path) -> None:
    audit, places, answers = RowAudit(), list[str](), bytearray()
    copies = folder / "copies"
    size = sum(entry[1] for path in source.paths for entry in _state(path))
    workers = cores() if size > _WORTH_WORKERS else 1
    with TokenWriter(folder / "tokens", "int32") as writer:
        given = rows((_near(path, copies) for path in source.paths), source.preferences)
        for results in run_stage(source, iter(lambda: tuple(islice(given, _AT_ONCE)), ()), workers):
            for where, (found, unread) in results:
                place = where.removeprefix(f"{copies}/")
                if not isinstance(found, str):
                    audit.row(place, sorted(unread))
                    for tokens, good in found:
                        writer.add([tokens])
                        answers.append(good + 2 * (len(found) == 1))
                        places.append(place)
                else:
                    audit.drop(place, found)
    shutil.rmtree(copies, ignore_errors=True)
    audit.check(" and ".join(source.paths), 1.0)
    if not places:
        raise DataError(f"{' and '.join(source.paths)}: no conversations found")
    (folder / "places.txt").write_text("".join(f"{place}\n" for place in places), encoding="utf-8")
    (folder / "answers.bin").write_bytes(answers)
    write_json(folder / "report.json", {"conversations": len(places), **audit.plain})


def row_audit(folder: Path, ignore_columns: Sequence[str]) -> RowAudit:
    """Return the row counts of a prepared folder."""
    audit = RowAudit(ignore_columns)
    audit.add(json.loads((folder / "report.json").read_text(encoding="utf-8")))
    return audit


def _state(path: str) -> list[list[Any]]:
    """Return the name, size and modification time of each file at a path.

    For a URL, versions replace the times. For `docstrings`, the Python version replaces the name.
    """
    if path == "docstrings":
        return [[sys.version, 0, 0]]
    if storage.is_url(path):
        try:
            return [[url, storage.size(url), storage.version(url)] for url in _objects(path)]
        except FileNotFoundError:
            raise DataError(f"the input {path} does not exist") from None
    root = Path(path).expanduser()
    files = sorted(file for file in root.rglob("*") if file.is_file()) if root.is_dir() else [root]
    return [file_state(file) for file in files if file.exists()]


def _objects(url: str) -> list[str]:
    return [storage.join(url, name) for name in sorted(storage.files(url))] or [url]


def _near(path: str, folder: Path) -> str:
    """Download the objects at a URL into `folder`, and return their local path; return a local path unchanged."""
    if not storage.is_url(path):
        return path
    for url in _objects(path):
        download(url, folder, False)
    return str(folder / path.partition("://")[2])
