"""Read JSON objects with a text, one per line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crosstrain import Chunk, DataError, Document, FileReader, Text, registry
from crosstrain.corpus.reader import line_number, split_file


@registry.register_reader("jsonl")
class JsonLinesReader(FileReader):
    """JSON lines: an object per line, its text under a key."""

    suffixes = (".jsonl", ".json", ".ndjson")
    shared_options = ("text_key",)

    @dataclass
    class Options(FileReader.Options):
        """Files to read, and the key of the text."""

        text_key: Text = "text"  # where an object keeps its text

    options: Options

    def chunks(self, file: Path) -> Iterator[Chunk]:
        return split_file(file, b"\n")

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        key, offset, after = self.options.text_key, 0, chunk.start
        for number, line in enumerate(chunk.read().split(b"\n"), 1):
            offset, after = after, after + len(line) + 1
            if not line or line.isspace():
                continue
            try:
                text = _text_of(json.loads(line.decode("utf-8" if offset else "utf-8-sig")), key)
            except UnicodeDecodeError as error:
                reason = f"is not UTF-8 text: invalid at byte {offset + error.start} of the file"
            except (ValueError, TypeError, RecursionError) as error:
                reason = f"is not a JSON object with text under {key!r}: {error}"
            else:
                yield Document(text, f"{chunk.file} at byte {offset}" if chunk.start else f"{chunk.file}:{number}")
                continue
            # Finding the number of the line takes a look at all that is before it.
            raise DataError(f"{chunk.file}:{line_number(chunk.file, offset)} {reason}")


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
