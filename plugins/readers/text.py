"""Read text files: each is a document, or a separator cuts it into several."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crosstrain import Chunk, Document, FileReader, Text, registry

from ..commands.prepare.reader import split_file


@registry.register_reader("text")
class TextReader(FileReader):
    """Text files in UTF-8: a file is a document, or a separator cuts it into several."""

    suffixes = (".txt",)
    contents = ()
    shared_options = ("separator",)

    @dataclass
    class Options(FileReader.Options):
        """Files to read, and the separator of documents."""

        separator: Text | None = None  # cuts a file into documents; None: a file is a document

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
