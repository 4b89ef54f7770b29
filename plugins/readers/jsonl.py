"""Read JSON objects that contain a text: one per line, or in a list."""

import json
from collections.abc import Iterator
from pathlib import Path

from crosstrain import Chunk, Document, registry

from ..commands.prepare.json_rows import entries, parsed
from ..commands.prepare.reader import ColumnReader, row_document, split_file


@registry.register_reader("jsonl")
class JsonLinesReader(ColumnReader):
    """JSON lines: one object per line, with its text under a key; or a list of objects, at the top or under a key."""

    suffixes = (".jsonl", ".json", ".ndjson", ".jl", ".jsonlines")
    contents = ("JSON document",)

    def chunks(self, file: Path) -> Iterator[Chunk]:
        whole = entries(file, lambda row: self.options.text_key in row)
        if whole is None:
            return split_file(file, b"\n")
        return iter([Chunk(file, 0, file.stat().st_size, b"\n".join(json.dumps(entry).encode() for entry in whole))])

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        key, after = self.options.text_key, chunk.start
        for number, line in enumerate(chunk.read().split(b"\n"), 1):
            start, after = after, after + len(line) + 1
            place = f"{chunk.file} at byte {start}" if chunk.start else f"{chunk.file}:{number}"
            if not line.strip():
                continue
            try:
                row = parsed(line)
                if not isinstance(row, dict):
                    raise ValueError(f"it is a {type(row).__name__}")
                if key not in row:
                    raise ValueError(f"it has {', '.join(map(repr, row)) or 'no keys'}; set text_key")
            except UnicodeDecodeError as error:
                self.unusable(place, f"is not UTF-8 text: invalid at byte {start + error.start} of the file")
            except ValueError as error:
                self.unusable(place, f"is not a JSON object with text under {key!r}: {error}")
            else:
                yield row_document(row[key], place, row, key)
