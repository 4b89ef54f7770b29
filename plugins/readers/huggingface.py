"""Read datasets that the Hugging Face library saved on disk."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstrain import DataError, Document, FilePath, Reader, Task, Text, registry
from crosstrain.corpus.io import existing, saved_dataset
from crosstrain.corpus.reader import cell, check_column

_ROWS = 4096  # in a task


@registry.register_reader("huggingface")
class HuggingFaceReader(Reader):
    """Folders that `datasets.save_to_disk` wrote: a document per row of each split, its text in a column."""

    shared_options = ("text_key",)

    @dataclass
    class Options:
        """Folder, column and splits to read."""

        path: FilePath  # a folder that save_to_disk wrote, of a dataset or of several splits
        text_key: Text = "text"  # the column that holds the text
        splits: list[Text] | None = None  # of a folder of several; None: all, sorted by name

    options: Options

    @classmethod
    def claims(cls, path: Path) -> bool:
        return path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))

    def _folders(self) -> list[Path]:
        path = existing(self.options.path)
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
        table = saved_dataset(folder)
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
        folder, start, stop = task.payload
        table = self._open(folder)
        for row, text in enumerate(table[start:stop][self.options.text_key], start):
            yield cell(folder, self.options.text_key, row, text)
