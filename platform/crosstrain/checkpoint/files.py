"""Checkpoint files: a safetensors writer that streams, and a reader of boxes that trusts no file.

A folder holds `manifest.json` (files with sizes and SHA-256 sums; logical tensors with their boxes), `state.json`
(step, samples, scaler, configuration), safetensors files, and the configuration and tokenizer that make it a Hugging
Face model folder. Nothing that is read is ever unpickled or executed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from crosstrain.checkpoint.boxes import CALLBACK, Box, Shard, whole_pieces
from crosstrain.checkpoint.manifest import (
    DTYPES,
    Files,
    FrozenParameter,
    StoredBox,
    StoredTensor,
    Tensors,
    read_manifest,
)
from crosstrain.utils.errors import CheckpointError, os_errors_as
from crosstrain.utils.files import open_regular

# ---------------------------------------------------------------------------------------------------------- writing


def write_safetensors(
    path: Path, tensors: dict[str, Tensor], produce: Callable[[str], Tensor] | None = None
) -> dict[str, Any]:
    """Write tensors one after another and return {"bytes", "sha256"}; no second copy is made in memory.

    With `produce`, `tensors` give only types and shapes, on the meta device, and `produce(key)` gives the data of each,
    one at a time.

    The layout is the safetensors format's: u64 header length, JSON header, then the data in the header's order.
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
    head += b" " * (-len(head) % 8)  # data begins at a multiple of 8 bytes

    def parts() -> Iterable[bytes | memoryview]:
        yield len(head).to_bytes(8, "little") + head
        for key, outline in tensors.items():
            if outline.numel():
                data = produce(key) if produce else outline
                assert (data.dtype, data.shape) == (outline.dtype, outline.shape)
                yield data.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

    return write_file(path, parts())


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file, flushed to disk, and return its {"bytes", "sha256"}."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb", buffering=0) as file:
        for part in parts:
            for start in range(0, len(part), 1 << 24):  # hashed while it is in the cache
                block = memoryview(part)[start : start + (1 << 24)]
                digest.update(block)
                size += len(block)
                while block:  # a raw write may be short
                    block = block[file.write(block) :]
            part = block = memoryview(b"")  # free it before the next part is made, which may be as large
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def file_sum(path: Path) -> dict[str, Any]:
    """Return {"bytes", "sha256"} of an existing file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def check_file(path: Path, expected: dict[str, Any]) -> None:
    """Raise CheckpointError, which names the file, unless its size and SHA-256 sum are as `expected`."""
    with os_errors_as(CheckpointError, f"{path}: cannot be read"), open_regular(path, follow=False) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected["bytes"]:
            raise CheckpointError(f"{path}: {size} bytes instead of {expected['bytes']}")
        if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
            raise CheckpointError(f"{path}: contents differ from what was written (SHA-256 mismatch)")


def fsync(path: Path) -> None:
    """Flush a file's contents, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------- reading


@dataclass
class Reader:
    """A reader of boxes of logical tensors, in whichever files they lie."""

    folder: Path
    tensors: Tensors
    files: Files = field(default_factory=dict)
    frozen: dict[str, FrozenParameter] = field(default_factory=dict)  # parameters that are not here

    @staticmethod
    def open(folder: Path, weights: str | None = None) -> Reader:
        """Open a checkpoint; CheckpointError where `read_manifest` refuses it. `verify` checks the sums.

        weights: a callback's name for tensors of the parameters' shapes, to read in place of those parameters.
        """
        files, tensors, frozen = read_manifest(folder)
        if weights is not None:
            own = {kind for kind, _ in tensors if kind.startswith(CALLBACK)}
            if (wanted := CALLBACK + weights) not in own:
                known = ", ".join(sorted(kind.removeprefix(CALLBACK) for kind in own)) or "only the trained ones"
                raise CheckpointError(f"{folder}: has no weights called {weights!r}; it has {known}")
            tensors |= {("param", name): stored for (kind, name), stored in tensors.items() if kind == wanted}
        return Reader(folder, tensors, files, frozen)

    @staticmethod
    def open_hugging_face(folder: Path) -> Reader:
        """Open a plain Hugging Face folder: every tensor whole, kind "param"."""
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(
                f"{folder}: no .safetensors file; weights in other formats (pytorch_model.bin is a pickle) are not "
                f"loaded, convert them with transformers' save_pretrained first"
            )
        tensors: Tensors = {}
        for path in paths:
            with _open_safetensors(path) as file:
                for key in file.keys():  # noqa: SIM118 - not a dict
                    part = file.get_slice(key)
                    shape = tuple(part.get_shape())
                    stored = StoredTensor(shape, part.get_dtype(), [StoredBox(path.name, key, Box.whole(shape))])
                    tensors["param", key] = stored
        return Reader(folder, tensors)

    def names(self, kind: str) -> set[str]:
        return {name for k, name in self.tensors if k == kind}

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.tensors}

    def verify(self) -> None:
        """Check every file's size and SHA-256 sum; raises CheckpointError, which names the file."""
        for name, expected in self.files.items():
            check_file(self.folder / name, expected)

    def whole(self, name: str) -> Tensor:
        """Read a parameter in fp32; raises as `fill` does."""
        value = torch.empty(self.tensors["param", name].shape)
        self.fill([Shard("param", name, tuple(value.shape), whole_pieces(value, tuple(value.shape)))])
        return value

    def fill(self, shards: Iterable[Shard]) -> None:
        """Copy the contents of every piece's box from the files, converted to the piece's type.

        Raises CheckpointError for a tensor that is missing or has another shape.
        """
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for shard in shards:
                tensor = f"{shard.kind} {shard.name}"
                stored = self.tensors.get((shard.kind, shard.name))
                if stored is None:
                    raise CheckpointError(f"{self.folder}: holds no {tensor}")
                there, here = list(stored.shape), list(shard.shape)
                if there != here:
                    raise CheckpointError(f"{self.folder}: {tensor} has shape {there} there and {here} in the model")
                for piece, where in product(shard.pieces, stored.boxes):
                    if (common := piece.box.intersect(where.box)) is None:
                        continue
                    path = self.folder / where.file
                    if path not in opened:
                        opened[path] = stack.enter_context(_open_safetensors(path))
                    found = _read(opened[path], path, where, stored.dtype, common)
                    piece.data[common.slices_in(piece.box)].copy_(found)


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from None


def _read(file: Any, path: Path, where: StoredBox, dtype: str, wanted: Box) -> Tensor:
    try:
        part = file.get_slice(where.key)
        if tuple(part.get_shape()) != where.box.shape:
            raise CheckpointError(f"{path}: {where.key} has shape {part.get_shape()}, not {list(where.box.shape)}")
        if part.get_dtype() != dtype:
            raise CheckpointError(f"{path}: {where.key} is {part.get_dtype()}, not {dtype}")
        return part[wanted.slices_in(where.box)] if where.box.shape else file.get_tensor(where.key)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from None
