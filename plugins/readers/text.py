"""Read text files: each is a document, or a separator cuts it into several."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crosstrain import Chunk, Document, FileReader, Text, registry
from crosstrain.corpus.reader import split_file


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
        offset, separator = chunk.start, (self.options.separator or "").encode()
        for part in chunk.read().split(separator) if separator else [chunk.read()]:
            place = f"{chunk.file} at byte {offset}" if separator else str(chunk.file)
            try:
                yield Document(part.decode("utf-8" if offset else "utf-8-sig"), place)
            except UnicodeDecodeError as error:
                self.unusable(str(chunk.file), f"is not UTF-8 text: invalid at byte {offset + error.start}")
            offset += len(part) + len(separator)
