"""Read text files: one document per file, or several with a separator between them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crosstrain import Chunk, Document, FileReader, Text, registry

from ..commands.prepare.reader import split_file


@registry.register_reader("text")
class TextReader(FileReader):
    """Text files in UTF-8: one document per file, or several with a separator between them."""

    suffixes = (".txt",)
    contents = ()
    shared_options = ("separator",)

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
