"""Read text files, and the standard library of the running Python: about 30 MB of text on every machine."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crosstrain import Chunk, Document, FileReader, Text, registry, split_file

_SKIPPED = {"site-packages", "dist-packages", "__pycache__"}


@registry.register_reader("text")
class TextReader(FileReader):
    """Text files in UTF-8: one document per file, or several with a separator between them."""

    suffixes = (".txt",)
    contents = ()

    @dataclass
    class Options(FileReader.Options):
        """Files to read, and the separator between documents."""

        separator: Text | None = None  # text between documents of a file; None: one document per file

    options: Options

    def chunks(self, file: Path) -> Iterator[Chunk]:
        if self.options.separator is None:
            return super().chunks(file)
        return split_file(file, self.options.separator.encode())

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        separator = self.options.separator
        if separator is None:
            yield Document(chunk.text(), str(chunk.file))
            return
        offset = chunk.start
        for part in chunk.text().split(separator):
            yield Document(part, f"{chunk.file} at byte {offset}")
            offset += len((part + separator).encode(errors="surrogateescape"))


@registry.register_reader("stdlib")
class StandardLibraryReader(FileReader):
    """The Python standard library, one document per .py file; needs no path."""

    @dataclass
    class Options:
        """No options."""

    _paths = ()

    def files(self) -> list[Path]:
        root = Path(sysconfig.get_paths()["stdlib"])
        return sorted(file for file in root.rglob("*.py") if not _SKIPPED & set(file.relative_to(root).parts))

    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        # The standard library contains test files that are deliberately not UTF-8.
        yield Document(chunk.read().decode(errors="replace").replace("\r\n", "\n"), str(chunk.file))
