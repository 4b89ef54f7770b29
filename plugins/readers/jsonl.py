"""Read JSON objects with a text: one per line, or those of a list."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from crosstrain import Chunk, DataError, Document, registry
from crosstrain.corpus import io
from crosstrain.corpus.reader import ColumnReader, flaw, line_number, split_file

# A list of objects, an object over several lines, or perhaps one around a list of objects.
_DOCUMENT = re.compile(rb'(\xef\xbb\xbf)?\s*(\[\s*[{\]]|\{[ \t]*\r?\n|(?P<perhaps>\{[^\n]*?"\s*:\s*\[\s*\{))')
_MOST = 1 << 29  # bytes of a JSON document: it is held in memory


@registry.register_reader("jsonl")
class JsonLinesReader(ColumnReader):
    """JSON lines: an object per line, its text under a key. Also a list of objects, by itself or under a key."""

    suffixes = (".jsonl", ".json", ".ndjson", ".jl", ".jsonlines")
    contents = ("JSON document",)

    def chunks(self, file: Path) -> Iterator[Chunk]:
        entries = _entries(file, self.options.text_key)
        if entries is None:
            return split_file(file, b"\n")
        return iter([Chunk(file, 0, file.stat().st_size, b"\n".join(json.dumps(entry).encode() for entry in entries))])

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        key, offset, after = self.options.text_key, 0, chunk.start
        for number, line in enumerate(chunk.read().split(b"\n"), 1):
            offset, after = after, after + len(line) + 1
            if not line or line.isspace():
                continue
            place = f"{chunk.file} at byte {offset}" if chunk.start else f"{chunk.file}:{number}"
            try:
                text, unread = _text_of(json.loads(line.decode("utf-8" if offset else "utf-8-sig")), key)
            except UnicodeDecodeError as error:
                reason = f"is not UTF-8 text: invalid at byte {offset + error.start} of the file"
            except (ValueError, TypeError, RecursionError) as error:
                reason = f"is not a JSON object with text under {key!r}: {error}"
            else:
                yield Document(text, place, unread)
                continue
            if chunk.start and self.drops is None:  # finding the line's number takes a look at all that is before it
                place = f"{chunk.file}:{line_number(chunk.file, offset)}"
            self.unusable(place, reason)


def _entries(file: Path, key: str) -> list[object] | None:
    """Return the objects of a file that is one JSON value. None for lines. DataError if it is neither."""
    with io.opened(file) as stream:
        head = stream.read(io.HEAD)
        found = _DOCUMENT.match(head)
        if not found:
            return None
        data = head + stream.read(_MOST)
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if found["perhaps"]:
            return None
        raise DataError(f"{file} is not JSON, or more than {_MOST >> 20} MiB in one value: {error}") from None
    if isinstance(content, dict) and key not in content:
        lists = [name for name, value in content.items() if isinstance(value, list)]
        if len(lists) == 1:
            entries = content.pop(lists[0])
            if isinstance(entries[0], dict):
                entries[0] = content | entries[0]  # the keys beside the list are named as not read
            return entries
    return content if isinstance(content, list) else [content]


def _text_of(record: object, key: str) -> tuple[str, tuple[str, ...]]:
    """Return the text of an object, empty for null, and its other keys. TypeError or ValueError if it has none."""
    if not isinstance(record, dict):
        raise TypeError(f"it is a {type(record).__name__}")
    if key not in record:
        raise ValueError(f"it has {', '.join(map(repr, record)) or 'no keys'}; set text_key")
    text = "" if record[key] is None else record[key]
    if reason := flaw(text):
        raise ValueError(f"the value {reason}")
    return text, tuple(name for name in record if name != key)
