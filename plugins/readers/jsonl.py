"""Objects with a text, one per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crosstrain import Chunk, DataError, Document, FileReader, Text, registry
from crosstrain.corpus import chunks


@registry.register_reader("jsonl")
class JsonLinesReader(FileReader):
    """JSON lines: an object per line, its text under a key."""

    suffixes = (".jsonl", ".json", ".ndjson")
    shared_options = ("text_key",)

    @dataclass
    class Options(FileReader.Options):
        """What to read."""

        text_key: Text = "text"  # where an object keeps its text

    options: Options

    def chunks(self, file: Path) -> Iterator[Chunk]:
        return chunks.split_file(file, b"\n")

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        for number, (offset, line) in enumerate(chunks.lines(chunk)):
            if not line or line.isspace():
                continue
            try:
                record = json.loads(line.decode("utf-8" if offset else "utf-8-sig"))
                text = _text_of(record, self.options.text_key)
            except UnicodeDecodeError as error:
                where = offset + error.start
                raise DataError(
                    f"{_place(chunk, offset)} is not UTF-8 text: invalid at byte {where} of the file"
                ) from None
            except (ValueError, TypeError, RecursionError) as error:
                key = self.options.text_key
                reason = f"is not a JSON object with text under {key!r}: {error}"
                raise DataError(f"{_place(chunk, offset)} {reason}") from None
            source = f"{chunk.file}:{number + 1}" if not chunk.start else f"{chunk.file} at byte {offset}"
            yield Document(text, source)


def _place(chunk: Chunk, offset: int) -> str:
    """`file:line`, which takes a look at all that is before it."""
    return f"{chunk.file}:{chunks.line_number(chunk.file, offset)}"


def _text_of(record: object, key: str) -> str:
    if not isinstance(record, dict):
        raise TypeError(f"it is a {type(record).__name__}")
    if key not in record:
        raise ValueError(f"it has {', '.join(map(repr, record)) or 'no keys'}; set text_key")
    text = record[key]
    if not isinstance(text, str):
        raise TypeError(f"the value is a {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which is no character
        raise ValueError(f"character {error.start} of the text is {text[error.start]!r}") from None
    return text
