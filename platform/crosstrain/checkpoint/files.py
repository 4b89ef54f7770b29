"""Checkpoint files: a streaming safetensors writer, and a reader of boxes that validates its input.

A folder holds `manifest.json` (files with sizes and checksums; logical tensors with their boxes), `state.json` (step,
samples, scaler, configuration), safetensors files, and the configuration and tokenizer that make it a Hugging Face
model folder. Nothing is ever unpickled or executed.

Checksums are 128-bit XXH3, one per 4 MiB chunk, so that part of a file can be verified separately. Hashing a cached
file takes a tenth of the time of reading it. Earlier versions used SHA-256. Either kind of checksum detects corruption;
neither protects against somebody who changes a file together with its checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from xxhash import xxh3_128

from crosstrain.checkpoint import bucket
from crosstrain.checkpoint.boxes import CALLBACK, Box, Piece, Shard, whole_pieces
from crosstrain.checkpoint.bucket import Chunk
from crosstrain.checkpoint.manifest import (
    CHUNK,
    DTYPES,
    ITEM_SIZES,
    Files,
    FrozenParameter,
    StoredBox,
    StoredTensor,
    Tensors,
    read_manifest,
)
from crosstrain.distributed.group import Group
from crosstrain.utils import storage
from crosstrain.utils.errors import CheckpointError, StorageError, os_errors_as
from crosstrain.utils.files import open_regular

_BLOCK = 1 << 20  # bytes per read; small enough for the CPU cache

# ---------------------------------------------------------------------------------------------------------- writing


def write_safetensors(
    path: Path, tensors: dict[str, Tensor], produce: Callable[[str], Tensor] | None = None
) -> dict[str, Any]:
    """Write tensors one after another, and return the file's {"bytes", "xxh3"}. Copies at most one tensor at a time.

    With `produce`, `tensors` are on the meta device and provide only dtypes and shapes. `produce(key)` returns the
    data of one tensor; it is called for one tensor at a time.

    The layout is the safetensors format: u64 header length, JSON header, then the data in header order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, position + size],
        }  # fmt: skip
        position += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # align the data to 8 bytes

    def parts() -> Iterable[bytes | memoryview]:
        yield len(head).to_bytes(8, "little") + head
        for key, outline in tensors.items():
            if outline.numel():
                data = produce(key) if produce else outline
                assert (data.dtype, data.shape) == (outline.dtype, outline.shape)
                yield data.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

    return write_file(path, parts())


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file, flush it to disk, and return its {"bytes", "xxh3"}."""
    sums = _Sums()
    with open(path, "xb", buffering=0) as file:
        for part in parts:
            for start in range(0, len(part), CHUNK):  # hash each chunk while it is in the cache
                block = memoryview(part)[start : start + CHUNK]
                sums.update(block)
                while block:  # a raw write may be short
                    block = block[file.write(block) :]
            part = block = memoryview(b"")  # free this part before the next one is produced
        os.fsync(file.fileno())
    return sums.entry()


class _Sums:
    """Incremental checksums of a file's chunks."""

    def __init__(self) -> None:
        self._size, self._sums = 0, list[xxh3_128]()

    def update(self, data: memoryview) -> None:
        while data:
            if self._size % CHUNK == 0:
                self._sums.append(xxh3_128())
            part = data[: CHUNK - self._size % CHUNK]
            self._sums[-1].update(part)
            self._size += len(part)
            data = data[len(part) :]

    def entry(self) -> dict[str, Any]:
        """Return {"bytes", "xxh3"}: the file's size, and the concatenated checksums as hexadecimal digits."""
        return {"bytes": self._size, "xxh3": "".join(chunk.hexdigest() for chunk in self._sums)}


def file_sum(path: Path) -> dict[str, Any]:
    """Return {"bytes", "xxh3"} of an existing file."""
    with open(path, "rb") as file:
        return _sums_of(file)


def _sums_of(file: BufferedReader) -> dict[str, Any]:
    sums, block = _Sums(), memoryview(bytearray(_BLOCK))
    while count := file.readinto(block):
        sums.update(block[:count])
    return sums.entry()


def check_file(path: Path, expected: dict[str, Any]) -> None:
    """Raise CheckpointError, with the file's name, unless its size and checksums are as `expected`."""
    with os_errors_as(CheckpointError, f"{path}: cannot be read"), open_regular(path, follow=False) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected["bytes"]:
            raise CheckpointError(f"{path}: {size} bytes instead of {expected['bytes']}")
        older = "sha256" in expected  # format versions 1 and 2
        found = hashlib.file_digest(file, "sha256").hexdigest() if older else _sums_of(file)["xxh3"]
        if found != expected["sha256" if older else "xxh3"]:
            raise CheckpointError(f"{path}: contents differ from what was written (a sum is wrong)")


def fsync(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------- reading


@dataclass
class Reader:
    """Reads boxes of logical tensors from the files of a checkpoint."""

    folder: Path
    tensors: Tensors
    files: Files = field(default_factory=dict)
    frozen: dict[str, FrozenParameter] = field(default_factory=dict)  # parameters that the checkpoint does not store
    _headers: dict[str, int] = field(default_factory=dict)  # file in a bucket -> size of its header
    _fetched: set[Chunk] = field(default_factory=set)

    def __post_init__(self) -> None:
        """For a bucket, compute the offset of each box: the boxes fill the end of their file, in manifest order."""
        if storage.origin(self.folder) is not None:
            ends = {name: entry["bytes"] for name, entry in self.files.items()}
            for stored in reversed(self.tensors.values()):
                for where in reversed(stored.boxes):
                    ends[where.file] -= where.box.numel * ITEM_SIZES[stored.dtype]
                    where.first = self._headers[where.file] = ends[where.file]

    @staticmethod
    def open(folder: Path, weights: str | None = None) -> Reader:
        """Open a checkpoint. Raises CheckpointError as `read_manifest` does. Only `verify` checks the checksums.

        weights: name of a callback; its tensors are read in place of the parameters of the same names.
        """
        files, tensors, frozen = read_manifest(folder)
        reader = Reader(folder, tensors, files, frozen)
        reader.choose(weights)
        return reader

    @staticmethod
    def open_hugging_face(folder: Path) -> Reader:
        """Open a plain Hugging Face folder: every tensor is whole and has kind "param"."""
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(
                f"{folder}: no .safetensors file; weights in other formats (pytorch_model.bin is a pickle) are not "
                f"loaded, convert them with transformers' save_pretrained first"
            )
        tensors: Tensors = {}
        for path in paths:
            with _File(path) as file:
                for key, entry in file.header.items():
                    box = Box.whole(tuple(entry["shape"]))
                    tensors["param", key] = StoredTensor(box.shape, entry["dtype"], [StoredBox(path.name, key, box)])
        return Reader(folder, tensors)

    def choose(self, weights: str | None) -> None:
        """Read a callback's weights in place of the parameters, or with None keep the parameters.

        Raises CheckpointError if the checkpoint has no such weights.
        """
        if weights is None:
            return
        own = {kind for kind, _ in self.tensors if kind.startswith(CALLBACK)}
        if (wanted := CALLBACK + weights) not in own:
            known = ", ".join(sorted(kind.removeprefix(CALLBACK) for kind in own)) or "only the trained ones"
            raise CheckpointError(f"{self.folder}: has no weights called {weights!r}; it has {known}")
        self.tensors |= {("param", name): stored for (kind, name), stored in self.tensors.items() if kind == wanted}

    def names(self, kind: str) -> set[str]:
        return {name for k, name in self.tensors if k == kind}

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.tensors}

    def verify(self, share: tuple[int, int] | None = None) -> None:
        """Check every file's size and checksums. Raises CheckpointError with the file's name.

        For a bucket, all sizes are checked, but only the checksums of data that is fetched for this: the files without
        tensors, and the weights. With `share` = (rank, ranks), this rank's share of all tensors replaces the weights.
        """
        if storage.origin(self.folder) is not None:
            bucket.check_sizes(self.folder, self.files)
            self.fetch_small()
            return self._fetch(self._share(*share) if share else self._weights())
        with ThreadPoolExecutor(8, "verify") as threads:  # reading and hashing release the GIL
            list(threads.map(check_file, map(self.folder.joinpath, self.files), self.files.values()))

    def fetch_small(self) -> None:
        """Fetch a bucket's files that hold no tensors, such as state.json, and check their checksums."""
        small = self.files.keys() - self._headers.keys()
        self._fetch({c for name in small for c in bucket.chunks(name, 0, self.files[name]["bytes"])})

    def _share(self, rank: int, ranks: int) -> set[Chunk]:
        """Return a rank's share of the chunks with tensors: mostly its own chunks, if the layout is unchanged."""
        found = set[Chunk]()
        for _, names in groupby(sorted(self._headers), key=lambda name: name.partition("-")[0]):
            every = [c for name in names for c in sorted(bucket.chunks(name, 0, self.files[name]["bytes"]))]
            found |= {*every[len(every) * rank // ranks : len(every) * (rank + 1) // ranks]}
        return found

    def _weights(self) -> set[Chunk]:
        """Return the chunks that hold parameters or callbacks' weights."""
        found = set[Chunk]()
        for (kind, _), stored in self.tensors.items():
            for where in stored.boxes if kind == "param" or kind.startswith(CALLBACK) else ():
                found |= self._chunks_of(where, 0, where.box.numel * ITEM_SIZES[stored.dtype])
        return found

    def _chunks_of(self, where: StoredBox, first: int, last: int) -> set[Chunk]:
        """Return the chunks that hold the bytes [first, last) of a box, and the header of its file."""
        assert where.first is not None
        header = bucket.chunks(where.file, 0, self._headers[where.file])
        return header | bucket.chunks(where.file, where.first + first, where.first + last)

    def whole(self, name: str) -> Tensor:
        """Read a parameter in fp32. Raises as `fill` does."""
        value = torch.empty(self.tensors["param", name].shape)
        self.fill([Shard("param", name, tuple(value.shape), whole_pieces(value, tuple(value.shape)))])
        return value

    def fill(self, shards: Iterable[Shard]) -> None:
        """Fill every piece with the data of its box from the files, converted to the piece's dtype.

        Raises CheckpointError for a tensor that is missing or has a different shape.
        """
        shards = sorted(shards, key=lambda shard: (shard.kind, shard.name))  # file order, for sequential reads
        if self._headers:
            self._fetch(self.chunks(shards))
        with ExitStack() as stack:
            opened: dict[str, _File] = {}
            for piece, where, dtype, common in self._overlaps(shards):
                if where.file not in opened:
                    opened[where.file] = stack.enter_context(_File(self.folder / where.file))
                opened[where.file].read(where, dtype, common, piece.part(common))

    def _overlaps(self, shards: Iterable[Shard]) -> Iterator[tuple[Piece, StoredBox, str, Box]]:
        """Yield each piece with every stored box that it overlaps, the stored dtype, and the overlap."""
        for shard in shards:
            tensor = f"{shard.kind} {shard.name}"
            stored = self.tensors.get((shard.kind, shard.name))
            if stored is None:
                raise CheckpointError(f"{self.folder}: holds no {tensor}")
            there, here = list(stored.shape), list(shard.shape)
            if there != here:
                raise CheckpointError(f"{self.folder}: {tensor} has shape {there} there and {here} in the model")
            for piece, where in product(shard.pieces, stored.boxes):
                if (common := piece.box.intersect(where.box)) is not None:
                    yield piece, where, stored.dtype, common

    def stage(self, shards: Iterable[Shard], group: Group) -> None:
        """Fetch the chunks that the ranks will read from a bucket, each chunk once per machine. Collective."""
        if not self._headers:
            return
        mine = bucket.machine(self.folder), sorted(self.chunks(shards))
        everyone = group.all_gather(mine)
        mates = [rank for rank, (machine, _) in enumerate(everyone) if machine == mine[0]]
        union = sorted(set[Chunk]().union(*(everyone[rank][1] for rank in mates)))
        first, last = (len(union) * (mates.index(group.rank) + i) // len(mates) for i in (0, 1))
        group.together(lambda: self._fetch(set(union[first:last])))
        self._fetched |= set(union)

    def _fetch(self, wanted: set[Chunk]) -> None:
        with os_errors_as(StorageError, f"{self.folder}: cannot be written to"):
            bucket.fetch(self.folder, self.files, wanted - self._fetched)
        self._fetched |= wanted

    def chunks(self, shards: Iterable[Shard]) -> set[Chunk]:
        """Return the chunks that `fill` reads, including the headers of their files."""
        found = set[Chunk]()
        for _, where, dtype, common in self._overlaps(shards):
            inside = common.slices_in(where.box)
            steps = [math.prod(where.box.shape[d + 1 :]) for d in range(len(inside))]
            first = sum(s.start * step for s, step in zip(inside, steps, strict=True))
            last = sum((s.stop - 1) * step for s, step in zip(inside, steps, strict=True)) + 1
            found |= self._chunks_of(where, first * ITEM_SIZES[dtype], last * ITEM_SIZES[dtype])
        return found


class _File(ExitStack):
    """A safetensors file opened for reading. The safetensors library has checked its header."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        try:
            self._raw = self.enter_context(open_regular(path).detach())
            self._tensors = self.enter_context(safe_open(path, framework="pt", device="cpu"))
            size = int.from_bytes(self._raw.read(8), "little")
            self.header: dict[str, dict[str, Any]] = json.loads(self._raw.read(size))
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            self.close()
            raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from None
        self.header.pop("__metadata__", None)
        self._first = 8 + size

    def read(self, where: StoredBox, dtype: str, wanted: Box, target: Tensor) -> None:
        """Copy the part `wanted` of a box to `target`, converted to the dtype of `target`."""
        if (entry := self.header.get(where.key)) is None:
            raise CheckpointError(f"{self.path}: holds no {where.key}")
        if tuple(entry["shape"]) != where.box.shape:
            raise CheckpointError(f"{self.path}: {where.key} has shape {entry['shape']}, not {list(where.box.shape)}")
        if entry["dtype"] != dtype:
            raise CheckpointError(f"{self.path}: {where.key} is {entry['dtype']}, not {dtype}")
        position = self._first + entry["data_offsets"][0]
        if where.first not in (None, position):  # the fetched bytes belong to other tensors
            raise CheckpointError(f"{self.path}: {where.key} is not in the manifest's order")
        as_it_is = wanted == where.box and target.is_contiguous() and DTYPES.get(target.dtype) == dtype
        if as_it_is and target.device.type == "cpu" and target.numel():
            memory = target.reshape(-1).view(torch.uint8).numpy().data
            while memory and (count := os.preadv(self._raw.fileno(), [memory], position)):
                memory, position = memory[count:], position + count
            if memory:
                raise CheckpointError(f"{self.path}: ends within {where.key}")
            return
        try:
            tensor = self._tensors.get_slice(where.key) if where.box.shape else self._tensors.get_tensor(where.key)
            target.copy_(tensor[wanted.slices_in(where.box)] if where.box.shape else tensor)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
