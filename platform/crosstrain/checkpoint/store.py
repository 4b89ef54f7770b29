"""Checkpoint files: safetensors written as a stream, a manifest of boxes, and a reader that trusts neither.

A folder holds `manifest.json` (files with sizes and SHA-256 sums; logical tensors with their boxes), `state.json`
(step, samples, scaler, configuration), safetensors files, and what makes it a Hugging Face model folder. Nothing that
is read is ever unpickled or executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from crosstrain.checkpoint.boxes import Box, Shard, check_cover
from crosstrain.errors import CheckpointError

FORMAT, VERSION = "crosstrain-checkpoint", 1
MANIFEST, STATE = "manifest.json", "state.json"

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
           torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*(/[A-Za-z0-9_][A-Za-z0-9_.\-]*)?")


class IncompatibleCheckpointError(CheckpointError):
    """Not damaged but of another format or version: never to be passed over in silence, let alone replaced."""


# ---------------------------------------------------------------------------------------------------------- writing


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> dict[str, Any]:
    """Write CPU tensors one after another and return {"bytes", "sha256"}; no second copy is made in memory.

    The layout is the safetensors format's: u64 header length, JSON header, then the data in the header's order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
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
        for tensor in tensors.values():
            if tensor.numel():
                yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data

    return write_file(path, parts())


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file, flushed to disk, and return its {"bytes", "sha256"}."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb", buffering=0) as file:
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), 1 << 24):
                block = view[start : start + (1 << 24)]
                digest.update(block)
                written = 0
                while written < len(block):  # a raw write may be short
                    written += file.write(block[written:])
                size += len(block)
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def is_safe_name(name: str) -> bool:
    """Whether a file of this name may be part of a checkpoint: a plain name, at most one folder down."""
    return _SAFE_NAME.fullmatch(name) is not None


def write_json(path: Path, value: Any) -> dict[str, Any]:
    return write_file(path, [json.dumps(value, indent=1).encode()])


def file_sum(path: Path) -> dict[str, Any]:
    """{"bytes", "sha256"} of a file that is there already."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def fsync(path: Path) -> None:
    """Make a file's contents, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------- reading


@dataclass
class StoredBox:
    """Where a box of a logical tensor lies: tensor `key` of the safetensors file `file`."""

    file: str
    key: str
    box: Box


@dataclass
class StoredTensor:
    shape: tuple[int, ...]
    dtype: str
    boxes: list[StoredBox]


@dataclass
class Reader:
    """Reads boxes of logical tensors from whichever files hold them."""

    folder: Path
    tensors: dict[tuple[str, str], StoredTensor]  # (kind, name) -> where
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def open(folder: Path) -> Reader:
        """Open a checkpoint, checking everything but the checksums (`verify` does those).

        Raises CheckpointError for a manifest that is missing or malformed, names a path outside the folder, or whose
        boxes do not tile every tensor exactly once.
        """
        manifest = read_json(folder / MANIFEST)
        try:
            if manifest["format"] != FORMAT or manifest["version"] != VERSION:
                raise IncompatibleCheckpointError(
                    f"{folder / MANIFEST}: format {manifest['format']!r} version {manifest['version']!r} is not one "
                    f"that this release reads ({FORMAT} {VERSION})"
                )
            files = {str(name): {"bytes": int(f["bytes"]), "sha256": str(f["sha256"])}
                     for name, f in manifest["files"].items()}  # fmt: skip
            tensors = {
                (str(kind), str(name)): StoredTensor(
                    tuple(map(int, t["shape"])),
                    str(t["dtype"]),
                    [StoredBox(str(f), str(key), Box(tuple(map(int, o)), tuple(map(int, s))))
                     for f, key, o, s in t["boxes"]],
                )
                for kind, group in manifest["tensors"].items()
                for name, t in group.items()
            }  # fmt: skip
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError, AssertionError) as error:
            raise CheckpointError(f"{folder / MANIFEST}: malformed manifest ({error!r})") from None
        reader = Reader(folder, tensors, files)
        reader._check()
        return reader

    @staticmethod
    def open_hugging_face(folder: Path) -> Reader:
        """Open a plain Hugging Face folder: every tensor whole, kind "param"."""
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(
                f"{folder}: no .safetensors file; weights in other formats (pytorch_model.bin is a pickle) are not "
                f"loaded, convert them with transformers' save_pretrained first"
            )
        tensors: dict[tuple[str, str], StoredTensor] = {}
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
        """The kind "param", and the optimizer's names for its state."""
        return {kind for kind, _ in self.tensors}

    def _check(self) -> None:
        for name in self.files:
            if not is_safe_name(name):
                raise CheckpointError(f"{self.folder / MANIFEST}: {name!r} is not a file name inside the checkpoint")
        for (kind, name), stored in self.tensors.items():
            for where in stored.boxes:
                if where.file not in self.files:
                    raise CheckpointError(
                        f"{self.folder / MANIFEST}: {kind} {name} lies in {where.file!r}, which is not among its files"
                    )
            problem = check_cover([where.box for where in stored.boxes], stored.shape)
            if problem:
                raise CheckpointError(f"{self.folder}: {kind} {name}: {problem}")

    def verify(self) -> None:
        """Compare every file's size and SHA-256 sum with the manifest's; raises CheckpointError naming the file."""
        for name, expected in self.files.items():
            path = self.folder / name
            if path.is_symlink() or not path.is_file():
                raise CheckpointError(f"{path}: missing")
            try:
                size = path.stat().st_size
                if size != expected["bytes"]:
                    raise CheckpointError(f"{path}: {size} bytes instead of {expected['bytes']}")
                if file_sum(path)["sha256"] != expected["sha256"]:
                    raise CheckpointError(f"{path}: contents differ from what was written (SHA-256 mismatch)")
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None

    def fill(self, shards: Iterable[Shard], source_name: Callable[[str], str] = lambda name: name) -> None:
        """Copy into every piece what the files hold for its box, converting the data type.

        `source_name` maps a canonical name to the name in this folder. Raises CheckpointError for a tensor that is
        missing or has another shape.
        """
        with ExitStack() as stack:
            opened: dict[str, Any] = {}
            for shard in shards:
                stored = self.tensors.get((shard.kind, source_name(shard.name)))
                if stored is None:
                    raise CheckpointError(f"{self.folder}: holds no {shard.kind} {shard.name}")
                if stored.shape != tuple(shard.shape):
                    raise CheckpointError(
                        f"{self.folder}: {shard.kind} {shard.name} has shape {list(stored.shape)} there and "
                        f"{list(shard.shape)} in the model"
                    )
                for piece in shard.pieces:
                    for where in stored.boxes:
                        common = piece.box.intersect(where.box)
                        if common is None:
                            continue
                        if where.file not in opened:
                            opened[where.file] = stack.enter_context(_open_safetensors(self.folder / where.file))
                        data = _read(opened[where.file], self.folder / where.file, where, common)
                        piece.data[common.slices_in(piece.box)].copy_(data)


def read_json(path: Path) -> Any:
    """Parsed JSON; CheckpointError where the file is missing or is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: not valid JSON") from None


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from None


def _read(file: Any, path: Path, where: StoredBox, wanted: Box) -> Tensor:
    try:
        part = file.get_slice(where.key)
        if tuple(part.get_shape()) != where.box.shape:
            raise CheckpointError(f"{path}: {where.key} has shape {part.get_shape()}, not {list(where.box.shape)}")
        return part[wanted.slices_in(where.box)] if where.box.shape else file.get_tensor(where.key)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from None
