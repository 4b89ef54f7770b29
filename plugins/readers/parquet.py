"""Read Parquet tables with a column of text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstrain import Chunk, DataError, Document, FileReader, Text, registry, require
from crosstrain.corpus.reader import cell, check_column
from crosstrain.utils.errors import first_line

_ROWS = 1024  # held at once


@registry.register_reader("parquet")
class ParquetReader(FileReader):
    """Parquet files: a document per row, its text in a column."""

    suffixes = (".parquet",)
    shared_options = ("text_key",)

    @dataclass
    class Options(FileReader.Options):
        """Files to read, and the column of the text."""

        text_key: Text = "text"  # the column that holds the text

    options: Options

    def chunks(self, file: Path) -> Iterator[Chunk]:
        """Yield a chunk per row group; start and stop divide the file's bytes evenly among the groups."""
        with _table(file) as table:
            check_column(file, table.schema_arrow.names, self.options.text_key)
            groups = table.metadata.num_row_groups
            size = file.stat().st_size
            for group in range(groups):
                yield Chunk(file, size * group // groups, size * (group + 1) // groups, str(group).encode())

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        assert chunk.data is not None
        group, column = int(chunk.data), self.options.text_key
        with _table(chunk.file) as table:
            row = sum(table.metadata.row_group(before).num_rows for before in range(group))
            for batch in table.iter_batches(batch_size=_ROWS, row_groups=[group], columns=[column]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield cell(chunk.file, column, row, text)


class _table:
    """Open a Parquet file. DataError if it, or data read from it in the block, is damaged."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.pyarrow = require("pyarrow", f"reading {file}")
        parquet = require("pyarrow.parquet", f"reading {file}")
        try:
            self.table = parquet.ParquetFile(self.pyarrow.OSFile(os.fsencode(file)))  # names need not be UTF-8
        except (self.pyarrow.ArrowException, OSError) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: BaseException) -> DataError:
        return DataError(f"{self.file} is not a readable Parquet file: {first_line(error)}")

    def __enter__(self) -> Any:
        return self.table

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.table.close(force=True)
        if isinstance(error, (self.pyarrow.ArrowException, OSError)):
            raise self._damaged(error) from None
