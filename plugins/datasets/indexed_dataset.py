"""Read and write tokenized documents in Megatron-LM's indexed files.

`prefix.bin` holds the tokens of all sequences, one after another. `prefix.idx` is the index of the sequences,
little-endian:

    9 bytes  b"MMIDIDX\\0\\0"        u64  version, 1        u8  dtype code
    u64      sequences S             u64  length of the document index, D + 1 for D documents
    int32[S] tokens per sequence     int64[S]  byte offset of each sequence in prefix.bin
    int64[D + 1]  document index: document d consists of sequences index[d] to index[d + 1]

This is the format of `megatron/core/datasets/indexed_dataset.py`. Dtype codes 6 and 7 are floating point and are
rejected: tokens were never stored as floats, and the meaning of these codes has changed once.
"""

import bisect
import os
import shutil
import struct
from contextlib import ExitStack
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crosstrain import DataError, replacing

from .byte_source import LocalBytes, RemoteBytes, byte_source

MAGIC = b"MMIDIDX\x00\x00"
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}.items()
}
_HEADER = struct.Struct("<9sQBQQ")
_SPOT_CHECKS = 16
_COPY = 1 << 22  # bytes copied at once
_CHUNK = 1 << 20  # index entries processed at once
# Half-width of the search window, in documents, around the interpolated position; enough for random document lengths.
_NEAR = 1 << 12


def best_dtype(vocab_size: int) -> np.dtype:
    """Return uint16 if the token IDs fit, else int32; the threshold is Megatron's."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


class TokenFile:
    """Tokens in `prefix.bin`, indexed by `prefix.idx`: local files, or objects in a bucket.

    The files are read, not memory-mapped: if a mapped file is truncated, the process is killed without a message.
    Opening takes constant time and checks only a few index entries; `verify()` checks all entries. Raises DataError if
    a file is missing, is not in this format, or has inconsistent lengths.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = prefix
        self.idx_path, self.bin_path = _paths(prefix)
        opened = []
        for path in (self.idx_path, self.bin_path):
            try:
                opened.append(byte_source(path))
            except OSError as error:
                gone = isinstance(error, FileNotFoundError)
                problem = "does not exist" if gone else f"cannot be read: {error.strerror}"
                name = str(prefix).rpartition("/")[2]
                raise DataError(f"{path} {problem} (tokens are stored in two files, {name}.bin and .idx)") from None
        index, self._bin = opened
        size, header = index.size, index.read(0, _HEADER.size)
        if not header.startswith(MAGIC):
            raise DataError(f"{self.idx_path} is not a Megatron index: it does not begin with MMIDIDX")
        if len(header) < _HEADER.size:
            raise DataError(f"{self.idx_path} is truncated: it ends after {size} bytes, within its header")
        _, version, code, self.num_sequences, index_length = _HEADER.unpack(header)
        if version != 1:
            raise DataError(f"{self.idx_path} has format version {version}; only version 1 is supported")
        if code not in DTYPES:
            raise DataError(f"{self.idx_path} has the dtype code {code}, which is not an integer type")
        self.dtype = DTYPES[code]
        expected = _HEADER.size + 12 * self.num_sequences + 8 * index_length
        if size != expected:
            state = "is truncated" if size < expected else "is too long"
            raise DataError(f"{self.idx_path} {state}: its header describes {expected} bytes, but it has {size}")
        self.sizes = _Column(self.idx_path, index, "<i4", _HEADER.size, self.num_sequences)
        offset = _HEADER.size + 4 * self.num_sequences
        self.pointers = _Column(self.idx_path, index, "<i8", offset, self.num_sequences)
        self.document_index = _Column(self.idx_path, index, "<i8", offset + 8 * self.num_sequences, index_length)
        if not index_length or self.document_index[0] != 0 or self.document_index[-1] != self.num_sequences:
            raise DataError(f"{self.idx_path} is damaged: its document index does not run from 0 to its last sequence")

        bin_size = self._bin.size
        used = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if self.num_sequences else 0
        if bin_size != used:
            state = "is truncated" if bin_size < used else "is too long"
            raise DataError(f"{self.bin_path} {state}: its index describes {used} bytes, but it has {bin_size}")
        self.num_tokens = bin_size // self.dtype.itemsize
        self._tokens = _Column(self.bin_path, self._bin, self.dtype, 0, self.num_tokens)
        checks = min(_SPOT_CHECKS, self.num_sequences)
        for sequence in np.linspace(0, self.num_sequences - 1, checks).astype(int).tolist():
            self._check(sequence, sequence + 1)

    def __reduce__(self) -> "tuple[type[TokenFile], tuple[str | Path]]":  # workers reopen the files
        return TokenFile, (self.prefix,)

    def _check(self, first: int, stop: int) -> None:
        """Raise DataError unless each of the sequences [first, stop) ends where the next one begins."""
        starts, sizes = self.pointers[first : stop + 1], self.sizes[first:stop]
        if stop == self.num_sequences:
            starts = np.append(starts, self._bin.size)
        wrong = np.flatnonzero((starts[:-1] + sizes.astype(np.int64) * self.dtype.itemsize != starts[1:]) | (sizes < 0))
        if wrong.size or (first == 0 and starts[0] != 0):
            where = first + int(wrong[0]) if wrong.size else 0
            raise DataError(f"{self.idx_path} is damaged: sequence {where} does not end where the next one begins")

    def verify(self) -> None:
        """Check every entry of the index, in linear time. Raises DataError with the first wrong entry."""
        for start in range(0, self.num_sequences, _CHUNK):
            self._check(start, min(start + _CHUNK, self.num_sequences))
        for start in range(0, self.num_documents, _CHUNK):
            if (wrong := np.flatnonzero(np.diff(self.document_index[start : start + _CHUNK + 1]) < 0)).size:
                raise DataError(f"{self.idx_path} is damaged: document {start + int(wrong[0])} ends before it begins")

    @property
    def num_documents(self) -> int:
        return len(self.document_index) - 1

    def document_start(self, document: int) -> int:
        """Return the token offset at which a document starts; for `num_documents`, the total number of tokens."""
        if not 0 <= document <= self.num_documents:
            raise IndexError(f"document {document} is out of range: {self.prefix} has {self.num_documents} documents")
        return self.sequence_start(int(self.document_index[document]))

    def sequence_start(self, sequence: int) -> int:
        """Return the token offset at which a sequence starts; for `num_sequences`, the total number of tokens."""
        if not 0 <= sequence <= self.num_sequences:
            raise DataError(
                f"{self.idx_path} is damaged: a document begins at sequence {sequence}, which does not exist"
            )
        if sequence == self.num_sequences:
            return self.num_tokens
        start, remainder = divmod(int(self.pointers[sequence]), self.dtype.itemsize)
        if remainder or not 0 <= start <= self.num_tokens:
            raise DataError(
                f"{self.idx_path} is damaged: sequence {sequence} begins at the invalid byte {self.pointers[sequence]}"
            )
        return start

    def document_at(self, position: int) -> int:
        """Return the index of the document that contains the token at offset `position`."""
        low = max(position * self.num_documents // max(self.num_tokens, 1) - _NEAR, 0)
        high = min(low + 2 * _NEAR, self.num_documents)
        if not self.document_start(low) <= position < self.document_start(high):
            low, high = 0, self.num_documents
        return bisect.bisect_right(range(self.num_documents), position, low, high, key=self.document_start) - 1

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Return the token offsets in [start, stop) at which documents begin; `start` must be above 0."""
        following = range(self.document_at(start - 1) + 1, self.num_documents)
        starts = takewhile(lambda position: position < stop, map(self.document_start, following))
        return np.unique(np.fromiter(starts, np.int64))

    def document(self, document: int) -> np.ndarray:
        """Return the tokens of one document, with all its sequences joined."""
        return self.tokens(self.document_start(document), self.document_start(document + 1))

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) in the file's dtype. Raises DataError if the file was truncated."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) are out of range: {self.prefix} has {self.num_tokens} tokens")
        return self._tokens.read(start, stop)

    @property
    def remote(self) -> bool:
        """True for objects in a bucket, for which `announce` saves time."""
        return isinstance(self._bin, RemoteBytes)

    def announce(self, ranges: list[tuple[int, int]]) -> None:
        """Start fetching token ranges [start, stop) that will be read soon."""
        if isinstance(self._bin, RemoteBytes):
            width = self.dtype.itemsize
            self._bin.announce((start * width, stop * width) for start, stop in ranges)


class TokenWriter(ExitStack[None]):
    """A writer of `prefix.bin` and `prefix.idx`, with one sequence per document.

    Only the lengths of the documents are kept in memory. Use the writer as a context manager. If the `with` block ends
    without an exception, the files are renamed to their final names, the index last, so an index that exists is
    complete. After an exception, the files are deleted.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        super().__init__()
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, known in DTYPES.items() if known == self.dtype)
        self.num_documents = self.num_tokens = 0
        self._sizes: list[np.ndarray] = []  # lengths of the documents
        self._idx, self._bin = (self.enter_context(replacing(Path(path))) for path in _paths(prefix))
        self.push(self._finish)  # called before the files are renamed

    def add(self, documents: list[list[int]]) -> None:
        """Append documents, each a list of token IDs. Raises DataError if an ID does not fit the dtype."""
        sizes = np.array([len(document) for document in documents], dtype="<i4")
        tokens = np.fromiter(chain.from_iterable(documents), np.int64, count=int(sizes.sum(dtype=np.int64)))
        limits = np.iinfo(self.dtype)
        if tokens.size and not limits.min <= tokens.min() <= tokens.max() <= limits.max:
            raise DataError(f"token IDs from {tokens.min()} to {tokens.max()} do not fit into {self.dtype.name}")
        self._bin.write(tokens.astype(self.dtype).tobytes())
        self._sizes.append(sizes)
        self.num_documents += len(sizes)
        self.num_tokens += len(tokens)

    def append(self, sizes: np.ndarray, file: Path) -> None:
        """Append documents: `file` contains the tokens in the writer's dtype, and `sizes` the document lengths."""
        with open(file, "rb") as source:
            shutil.copyfileobj(source, self._bin, _COPY)
        self._sizes.append(sizes.astype("<i4"))
        self.num_documents += len(sizes)
        self.num_tokens += int(sizes.sum(dtype=np.int64))

    def _finish(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the index, unless the block has raised an exception, and write both files to the disk."""
        if kind is not None:
            return
        n = self.num_documents
        sizes = np.concatenate([np.empty(0, "<i4"), *self._sizes])
        ends = np.cumsum(sizes, dtype="<i8") * self.dtype.itemsize
        self._idx.write(_HEADER.pack(MAGIC, 1, self._code, n, n + 1))
        for column in (sizes, ends - sizes * np.int64(self.dtype.itemsize), np.arange(n + 1, dtype="<i8")):
            self._idx.write(column.data)
        for file in (self._bin, self._idx):
            file.flush()
            os.fsync(file.fileno())


def _paths(prefix: str | Path) -> tuple[str, str]:
    return f"{prefix}.idx", f"{prefix}.bin"


class _Column:
    """An array in a section of a file, read on access; raises DataError if the file has become too short."""

    def __init__(
        self, path: str, source: LocalBytes | RemoteBytes, dtype: npt.DTypeLike, offset: int, count: int
    ) -> None:
        self._path, self._dtype, self._offset, self._count = path, np.dtype(dtype), offset, count
        self._read = source.read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: int | slice) -> Any:  # returns an int, or an array for a slice
        chosen = range(self._count)[key]
        if isinstance(chosen, range):
            return self.read(chosen.start, max(chosen.start, chosen.stop))
        return int(self.read(chosen, chosen + 1)[0])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return entries [start, stop), which must exist."""
        size = self._dtype.itemsize
        position, length = self._offset + start * size, (stop - start) * size
        try:
            data = self._read(position, position + length)
        except OSError as error:  # os_errors_as would take 10% of the time per sample
            raise DataError(f"{self._path} cannot be read ({error.strerror or error})") from None
        if len(data) < length:
            raise DataError(
                f"{self._path} was truncated while it was being read: it ends before byte {position + length}"
            )
        return np.frombuffer(data, self._dtype)
