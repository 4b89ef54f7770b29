"""Checkpoint files: a streaming safetensors writer, and a reader of boxes that validates its input.

A folder holds `manifest.json` (files with sizes and checksums; logical tensors with their boxes), `state.json` (step,
samples, scaler, configuration), safetensors files, and the configuration and tokenizer that make it a Hugging Face
model folder. Nothing is ever unpickled or executed.

Checksums are 128-bit XXH3, one per 4 MiB chunk. Hashing takes a tenth of the time of reading a cached file. Earlier
versions used SHA-256. Either kind of checksum detects corruption; neither protects against somebody who changes a file
together with its checksum.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import product
from pathlib import Path
from typing import Any, Self

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from torch import Tensor
from xxhash import xxh3_128

from crosstrain.checkpoint.boxes import CALLBACK, Box, Shard, whole_pieces
from crosstrain.checkpoint.manifest import (
    CHUNK,
    DTYPES,
    MANIFEST,
    MOST_BYTES,
    Files,
    FrozenParameter,
    StoredBox,
    StoredTensor,
    Tensors,
    read_manifest,
)
from crosstrain.utils import storage
from crosstrain.utils.errors import CheckpointError, StorageError, os_errors_as
from crosstrain.utils.files import open_regular, write_atomically

OTHER = "; check that `model` is the model that was trained"

# ---------------------------------------------------------------------------------------------------------- writing


def write_safetensors(
    path: Path, tensors: dict[str, Tensor], produce: Callable[[str], Tensor] | None = None
) -> dict[str, Any]:
    """Write tensors in order, and return the file's {"bytes", "xxh3"}. Copies at most one tensor at a time.

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
    """Write a new file, flush it to disk, and return {"bytes", "xxh3"}, as `file_sum` does."""
    size, sums = 0, list[xxh3_128]()
    with open(path, "xb") as file:
        for part in parts:
            rest = memoryview(part)
            while rest:
                if size % CHUNK == 0:
                    sums.append(xxh3_128())
                block = rest[: CHUNK - size % CHUNK]
                sums[-1].update(block)
                file.write(block)  # write the block right after hashing it, while it is in the cache
                size += len(block)
                rest = rest[len(block) :]
            part = rest = block = memoryview(b"")  # free this part before the next part is produced
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "xxh3": "".join(chunk.hexdigest() for chunk in sums)}


def file_sum(path: Path) -> dict[str, Any]:
    """Return {"bytes", "xxh3"} of an existing file: its size, and its chunks' checksums as hexadecimal digits."""
    with open(path, "rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "xxh3": _sums_of(file)}


def _sums_of(file: BufferedReader) -> str:
    return "".join(xxh3_128(chunk).hexdigest() for chunk in iter(lambda: file.read(CHUNK), b""))


def check_file(path: Path, expected: dict[str, Any]) -> None:
    """Raise CheckpointError, with the file's name, unless the file has the `expected` size and checksums."""
    place = storage.origin(path) or path
    with os_errors_as(CheckpointError, f"{place}: cannot be read"), open_regular(path, follow=False) as file:
        if (size := os.fstat(file.fileno()).st_size) != expected["bytes"]:
            raise CheckpointError(f"{place}: has {size} bytes, expected {expected['bytes']}")
        older = "sha256" in expected  # format versions 1 and 2
        found = hashlib.file_digest(file, "sha256").hexdigest() if older else _sums_of(file)
        if found != expected["sha256" if older else "xxh3"]:
            raise CheckpointError(f"{place}: contents do not match their checksum")


def fsync(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------- in a bucket


def has_manifest(folder: Path) -> bool:
    """Return True if `folder` is a checkpoint, that is, has a manifest, on this machine or in its bucket."""
    url = storage.origin(folder)
    return os.path.lexists(folder / MANIFEST) if url is None else MANIFEST in storage.listing(url)


def fetch_manifest(folder: Path) -> None:
    """Replace the local copy of a manifest. Raises CheckpointError if the bucket does not contain the manifest."""
    url = storage.join(storage.origin(folder) or "", MANIFEST)
    try:
        text = storage.read_end(url, MOST_BYTES, first=True)  # a manifest that is cut off fails its checksum
    except FileNotFoundError:
        raise CheckpointError(f"{url}: no such object") from None
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / MANIFEST, text)


def check_sizes(folder: Path, files: Files) -> None:
    """Raise CheckpointError unless the bucket has every file of a checkpoint, with the right size."""
    url = storage.origin(folder) or ""
    there = storage.listing(url)
    for name, entry in files.items():
        if there.get(name) != entry["bytes"]:
            found = "missing" if name not in there else f"has {there[name]} bytes"
            raise CheckpointError(f"{storage.join(url, name)}: {found}, expected {entry['bytes']} bytes")


# ---------------------------------------------------------------------------------------------------------- reading


@dataclass
class Reader:
    """Reads boxes of logical tensors from the files of a checkpoint."""

    folder: Path
    tensors: Tensors
    files: Files = field(default_factory=dict)
    frozen: dict[str, FrozenParameter] = field(default_factory=dict)  # parameters that the checkpoint does not store
    _fetched: set[str] = field(default_factory=set)  # files of a bucket that have a verified local copy

    @staticmethod
    def open(folder: Path, weights: str | None = None) -> "Reader":
        """Open a checkpoint. Raises CheckpointError as `read_manifest` does. Does not check the files' checksums.

        weights: name of a callback, to read the callback's tensors instead of the parameters with the same names.
        """
        return Reader(folder, *read_manifest(folder)).choose(weights)

    @staticmethod
    def open_hugging_face(folder: Path) -> "Reader":
        """Open a plain Hugging Face folder: every tensor is whole and has kind "param"."""
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(
                f"{folder}: no .safetensors file; convert weights in other formats, such as the pickle "
                f"pytorch_model.bin, with transformers' save_pretrained first"
            )
        tensors: Tensors = {}
        for path in paths:
            with _opened(path) as file:
                for key in file.offset_keys():
                    stored = file.get_slice(key)
                    box = Box.whole(tuple(stored.get_shape()))
                    tensors["param", key] = StoredTensor(
                        box.shape, stored.get_dtype(), [StoredBox(path.name, key, box)]
                    )
        return Reader(folder, tensors)

    def choose(self, weights: str | None) -> Self:
        """Read a callback's weights instead of the parameters; None: read the parameters. Returns this reader.

        Raises CheckpointError if the checkpoint has no such weights.
        """
        if weights is None:
            return self
        own = {kind for kind, _ in self.tensors if kind.startswith(CALLBACK)}
        if (wanted := CALLBACK + weights) not in own:
            known = ", ".join(sorted(kind.removeprefix(CALLBACK) for kind in own)) or "only the trained weights"
            raise CheckpointError(f"{self.folder}: has no weights called {weights!r}; it has {known}")
        self.tensors |= {("param", name): stored for (kind, name), stored in self.tensors.items() if kind == wanted}
        return self

    def names(self, kind: str) -> set[str]:
        return {name for k, name in self.tensors if k == kind}

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.tensors}

    def verify(self, share: tuple[int, int] | None = None) -> None:
        """Check every file's size and checksums. Raises CheckpointError with the file's name.

        In a bucket, the sizes of all files are checked, but the checksums only of those files that are fetched. These
        are the files without tensors, and the files with weights. With `share` = (rank, ranks), this rank's share of
        all files is fetched instead of the files with weights.
        """
        if storage.origin(self.folder) is not None:
            check_sizes(self.folder, self.files)
            weights = {kind for kind in self.kinds() if kind == "param" or kind.startswith(CALLBACK)}
            self._fetch(sorted(self.files)[share[0] :: share[1]] if share else self._files_of(weights))
            self.fetch_small()
        else:
            with ThreadPoolExecutor(8, "verify") as threads:  # reading and hashing release the GIL
                list(threads.map(check_file, map(self.folder.joinpath, self.files), self.files.values()))

    def fetch_small(self) -> None:
        """Fetch a bucket's files that hold no tensors, such as state.json, and check their checksums."""
        self._fetch(self.files.keys() - self._files_of(self.kinds()))

    def _files_of(self, kinds: set[str]) -> set[str]:
        """Return the files that hold tensors of these kinds."""
        return {where.file for (kind, _), stored in self.tensors.items() if kind in kinds for where in stored.boxes}

    def _fetch(self, names: Iterable[str]) -> None:
        """Download a bucket's files, unless the local copies are intact. Raises CheckpointError for a damaged file."""
        for name in sorted({*names} - self._fetched) if storage.origin(self.folder) else ():
            path = self.folder / name
            with (
                os_errors_as(StorageError, f"{self.folder}: cannot be written to"),
                # Lock, as other ranks on this machine may fetch the same file. The lock file is outside the folder.
                FileLock(self.folder.with_name(f".{self.folder.name}.{name}.lock")),
            ):
                try:
                    check_file(path, self.files[name])
                except CheckpointError:
                    storage.download(storage.origin(path) or "", path)
                    check_file(path, self.files[name])
            self._fetched.add(name)

    def whole(self, name: str, kind: str = "param", dtype: torch.dtype = torch.float32) -> Tensor:
        """Read a tensor, by default a parameter in fp32. Raises CheckpointError as `fill` does."""
        value = torch.empty(self.tensors[kind, name].shape, dtype=dtype)
        self.fill([Shard(kind, name, tuple(value.shape), whole_pieces(value, tuple(value.shape)))])
        return value

    def fill(self, shards: Iterable[Shard]) -> None:
        """Fill every piece with the data of its box from the files, converted to the piece's dtype.

        Raises CheckpointError, before anything is read, for a tensor that is missing or has a different shape.
        """
        # Sort parameters first, so that an error names the parameter, not its optimizer state. Keep the rest in file
        # order, for sequential reads.
        shards = sorted(shards, key=lambda shard: (shard.kind != "param", shard.kind, shard.name))
        for shard in shards:
            tensor = shard.name if shard.kind == "param" else f"{shard.kind} {shard.name}"
            stored = self.tensors.get((shard.kind, shard.name))
            if stored is None:
                raise CheckpointError(f"{self.folder}: the model's {tensor} is missing{OTHER}")
            if (there := list(stored.shape)) != (here := list(shard.shape)):
                raise CheckpointError(
                    f"{self.folder}: {tensor} has shape {there} in the checkpoint and {here} in the model{OTHER}"
                )
        with ExitStack() as stack:
            opened: dict[str, safe_open] = {}
            for shard in shards:
                stored = self.tensors[shard.kind, shard.name]
                for piece, where in product(shard.pieces, stored.boxes):
                    if (common := piece.box.intersect(where.box)) is None:
                        continue
                    if where.file not in opened:
                        self._fetch([where.file])
                        opened[where.file] = stack.enter_context(_opened(self.folder / where.file))
                    self._read(opened[where.file], where, stored.dtype, common, piece.part(common))

    def _read(self, file: safe_open, where: StoredBox, dtype: str, wanted: Box, target: Tensor) -> None:
        """Copy the part `wanted` of a box to `target`, converted to the dtype of `target`."""
        path = self.folder / where.file
        try:
            stored = file.get_slice(where.key)
            shape, found = stored.get_shape(), stored.get_dtype()
            if tuple(shape) != where.box.shape:
                raise CheckpointError(f"{path}: {where.key} has shape {shape}, expected {list(where.box.shape)}")
            if found != dtype:
                raise CheckpointError(f"{path}: {where.key} has dtype {found}, expected {dtype}")
            target.copy_(stored[wanted.slices_in(where.box)] if shape else file.get_tensor(where.key))
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {error}") from None


def _opened(path: Path) -> safe_open:
    """Open a safetensors file for reading. The safetensors library checks the file's header."""
    with os_errors_as(CheckpointError, f"{path}: cannot be read as safetensors", SafetensorError):
        open_regular(path).close()  # `open_regular` raises OSError for a FIFO; `safe_open` would wait
        return safe_open(path, framework="pt", device="cpu")
