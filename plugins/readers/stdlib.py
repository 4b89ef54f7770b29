"""Read the standard library of the running Python: about 30 MB of text on every machine."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crosstrain import Chunk, Document, FileReader, registry

_SKIPPED = {"site-packages", "dist-packages", "__pycache__"}


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
        # Python tests its own decoder with files that are deliberately not UTF-8.
        yield Document(chunk.read().decode(errors="replace").replace("\r\n", "\n"), str(chunk.file))
