"""Read tables with a text column: CSV files, Parquet files and saved Hugging Face datasets."""

import csv
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from crosstrain import Chunk, DataError, Document, registry

from ..commands.prepare import io
from ..commands.prepare.reader import ColumnReader, check_column, row_document

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
class HuggingFaceReader(ColumnReader):
    """Folders written by `datasets.save_to_disk`: one document per row of each split, with its text in a column."""

    @classmethod
    def claims(cls, path: Path) -> bool:
        return path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))

    def files(self) -> list[Path]:
        return [file for item in self._paths for file in io.saved_files(io.existing(item))]

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        key = self.options.text_key
        with io.arrow_table(chunk.file) as table:
            check_column(chunk.file, table.names, key)
            for number, row in enumerate(table.rows):
                yield row_document(row[key], f"column {key!r} of {chunk.file}, row {number}", table.names, key)
