"""Read Parquet tables with a column of text."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crosstrain import Chunk, Document, FileReader, Text, registry
from crosstrain.corpus.io import parquet_table
from crosstrain.corpus.reader import cell, check_column

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
        with parquet_table(file) as table:
            check_column(file, table.schema_arrow.names, self.options.text_key)
            groups = table.metadata.num_row_groups
            size = file.stat().st_size
            for group in range(groups):
                yield Chunk(file, size * group // groups, size * (group + 1) // groups, str(group).encode())

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        assert chunk.data is not None
        group, column = int(chunk.data), self.options.text_key
        with parquet_table(chunk.file) as table:
            row = sum(table.metadata.row_group(before).num_rows for before in range(group))
            for batch in table.iter_batches(batch_size=_ROWS, row_groups=[group], columns=[column]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield cell(chunk.file, column, row, text)
