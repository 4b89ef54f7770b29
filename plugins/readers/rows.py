"""Read texts from rows: JSON lines, CSV files, Parquet files and saved Hugging Face datasets."""

import csv
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from crosstrain import Chunk, DataError, Document, registry

from ..commands.prepare import io
from ..commands.prepare.reader import ColumnReader, check_column, row_document, split_file

# Maximum number of characters per value; an unclosed quotation mark makes the rest of the file one value.
csv.field_size_limit(1 << 28)


@registry.register_reader("jsonl")
class JsonLinesReader(ColumnReader):
    """Texts under a key of JSON objects: one object per line, or a list of objects at the top level or under a key."""

    suffixes = (".jsonl", ".json", ".ndjson", ".jl", ".jsonlines")
    contents = ("JSON document",)

    def chunks(self, file: Path) -> Iterator[Chunk]:
        whole = io.entries(file, lambda row: self.options.text_key in row)
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
                row = io.parsed(line)
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


@registry.register_reader("csv")
class CsvReader(ColumnReader):
    """CSV and TSV files: one document per row, with its text in a column; the first row has the column names."""

    suffixes = (".csv", ".tsv")
    contents = ()

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        file, key = chunk.file, self.options.text_key
        with io.opened(file) as stream:
            lines = (line.decode(errors="surrogateescape") for line in io.pieces(stream, b"\n"))
            first = next(lines, "").removeprefix("\ufeff")
            rows = csv.reader(chain([first], lines), delimiter=max(",;\t|", key=first.count), strict=True)
            try:
                names = next(rows, [])
                check_column(file, names, key)
                for row in filter(None, rows):
                    if len(row) == len(names):
                        yield row_document(row[names.index(key)], f"{file}:{rows.line_num}", names, key)
                    else:
                        self.unusable(f"{file}:{rows.line_num}", f"has {len(row)} values for {len(names)} columns")
            except csv.Error as error:
                raise DataError(
                    f"{file}:{rows.line_num} is not a row of a table ({error}): quote values that contain quotation"
                    " marks, and double the marks inside"
                ) from None


@registry.register_reader("parquet")
class TableReader(ColumnReader):
    """Parquet files, and folders of `datasets.save_to_disk`: one document per row, with its text in a column."""

    suffixes = (".parquet", ".arrow")
    contents = ("Parquet table", "Arrow table")

    def chunks(self, file: Path) -> Iterator[Chunk]:
        """Yield one chunk per row group; the chunks divide the file's bytes evenly."""
        with io.table(file) as table:
            check_column(file, table.names, self.options.text_key)
            size, groups = file.stat().st_size, len(table.groups)
            for group in range(groups):
                yield Chunk(file, size * group // groups, size * (group + 1) // groups, str(group).encode())

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        assert chunk.data is not None
        group, key = int(chunk.data), self.options.text_key
        with io.table(chunk.file) as table:
            for number, row in enumerate(table.rows(row_groups=[group], columns=[key]), sum(table.groups[:group]) + 1):
                yield row_document(row[key], f"column {key!r} of {chunk.file}, row {number}", table.names, key)
