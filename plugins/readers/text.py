"""Text files: a document each, or as many as a separator cuts them into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crosstrain import Document, FileReader, Text, registry
from crosstrain.corpus import chunks
from crosstrain.corpus.reader import Piece


@registry.register_reader("text")
class TextReader(FileReader):
    """Text files in UTF-8: a file is a document, or a separator cuts it into several."""

    suffixes = (".txt",)
    notes = ("separator",)

    @dataclass
    class Options(FileReader.Options):
        """What to read."""

        separator: Text | None = None  # cuts a file into documents; None: a file is a document

    options: Options

    def pieces(self, file: Path) -> Iterator[Piece]:
        if self.options.separator is None:
            return super().pieces(file)
        return chunks.cut(file, self.options.separator.encode())

    def read_piece(self, piece: Piece) -> Iterator[Document]:
        text, separator = chunks.decoded(piece), self.options.separator
        if separator is None:
            yield Document(text, str(piece.file))
            return
        offset = piece.start
        for part in text.split(separator):
            yield Document(part, f"{piece.file} at byte {offset}")
            offset += len((part + separator).encode())
