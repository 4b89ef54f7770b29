"""Read tables with a text column: CSV files, Parquet files and saved Hugging Face datasets."""

import csv
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from crosstrain import Chunk, DataError, Document, FilePath, Reader, Task, Text, registry

from ..commands.prepare import io
from ..commands.prepare.reader import ColumnReader, check_column, row_document

_ROWS = 4096  # rows of a saved dataset per task
csv.field_size_limit(1 << 28)  # characters per value: an unclosed quotation mark makes the rest of the file one value


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
                    f"{file}:{rows.line_num} is not a row of a table ({error}): put values with a quotation mark into"
                    " quotation marks, and double those inside"
                ) from None


@registry.register_reader("parquet")
class ParquetReader(ColumnReader):
    """Parquet files: one document per row, with its text in a column."""

    suffixes = (".parquet",)
    contents = ("Parquet table",)

    def chunks(self, file: Path) -> Iterator[Chunk]:
        """Yield one chunk per row group; start and stop divide the file's bytes evenly among the groups."""
        with io.parquet_table(file) as table:
            check_column(file, table.names, self.options.text_key)
            groups = table.metadata.num_row_groups
            size = file.stat().st_size
            for group in range(groups):
                yield Chunk(file, size * group // groups, size * (group + 1) // groups, str(group).encode())

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        assert chunk.data is not None
        group, key = int(chunk.data), self.options.text_key
        with io.parquet_table(chunk.file) as table:
            before = sum(table.metadata.row_group(number).num_rows for number in range(group))
            for number, row in enumerate(table.rows(row_groups=[group], columns=[key]), before + 1):
                yield row_document(row[key], f"column {key!r} of {chunk.file}, row {number}", table.names, key)


@registry.register_reader("huggingface")
class HuggingFaceReader(Reader):
    """Folders written by `datasets.save_to_disk`: one document per row of each split, with its text in a column."""

    shared_options = ("text_key",)

    @dataclass
    class Options:
        """Folder, column and splits to read."""

        path: FilePath  # folder written by save_to_disk, with one dataset or several splits
        text_key: Text = "text"  # column with the text
        splits: list[Text] | None = None  # splits to read if the folder has several; None: all, sorted by name

    options: Options

    @classmethod
    def claims(cls, path: Path) -> bool:
        return path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))

    def _folders(self) -> list[Path]:
        path = io.existing(self.options.path)
        if (path / "state.json").is_file():
            return [path]
        splits = sorted(file.parent.name for file in path.glob("*/state.json"))
        wanted = splits if self.options.splits is None else self.options.splits
        if missing := [name for name in wanted if name not in splits]:
            raise DataError(f"{path} has no split {missing[0]!r}; it has {', '.join(splits) or 'none'}")
        if not wanted:
            raise DataError(f"{path} is no dataset that save_to_disk wrote: it has no state.json")
        return [path / name for name in wanted]

    def _open(self, folder: Path) -> Any:
        table = io.saved_dataset(folder)
        check_column(folder, table.column_names, self.options.text_key)
        return table

    def tasks(self) -> Iterator[Task]:
        for folder in self._folders():
            table = self._open(folder)
            state = hashlib.blake2b((folder / "state.json").read_bytes(), digest_size=12).hexdigest()
            bytes_per_row = sum(file.stat().st_size for file in folder.glob("*.arrow")) / max(len(table), 1)
            for start in range(0, len(table), _ROWS):
                stop = min(start + _ROWS, len(table))
                yield Task(f"{state}-{folder}-{start}", int(bytes_per_row * (stop - start)), (folder, start, stop))

    def read(self, task: Task) -> Iterator[Document]:
        folder, first, end = task.payload
        table, key = self._open(folder), self.options.text_key
        rows = io.saved_rows(folder, table.select_columns([key]).select(range(first, end)))
        for number, row in enumerate(rows, first):
            yield row_document(row[key], f"column {key!r} of {folder}, row {number}", table.column_names, key)
