"""The manifest and other JSON files of a checkpoint. The files may be untrusted: every value is checked before use.

A manifest that passes the checks is small enough to process, refers only to files in its folder, and contains only
printable names. The boxes that it lists fit into their files.
"""

import hashlib
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as show
from typing import Any

import torch

from crosstrain.checkpoint.boxes import Box, check_cover
from crosstrain.utils.errors import CheckpointError, os_errors_as
from crosstrain.utils.files import read_regular, unique_keys

FORMAT, VERSION = "crosstrain-checkpoint", 3
MANIFEST, STATE = "manifest.json", "state.json"

# Since version 2, a manifest ends with the first text, the SHA-256 hash of all bytes so far, and the second text.
_SUM_BEGINS, _SUM_ENDS = b',\n "sha256": "', b'"\n}'

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
           torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip
STORED_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

# Limits for a manifest of a million boxes: GPT-2 1.5B with each parameter and moment sharded over 500 ranks. Parsed
# values take up to 30 times the memory of their text, so the number of values is limited, too.
MOST_BYTES, _MOST_VALUES = 1 << 28, 1 << 24
CHUNK = 1 << 22  # bytes of a file per checksum
DIGITS = 32  # hexadecimal digits of a checksum
_LONGEST_NAME, _MOST_DIMENSIONS = 1000, 16
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")  # file name: not hidden, and without a folder


class IncompatibleCheckpointError(CheckpointError):
    """A checkpoint of a different format or version. Such a checkpoint is intact, and is never skipped or replaced."""


def box_key(kind: str, name: str, shape: tuple[int, ...], box: Box) -> str:
    """Return the name of a box in its file: the tensor's name, plus the offset if the box is not the whole tensor."""
    name = name if kind == "param" else f"{kind}/{name}"
    return name if box.shape == shape else f"{name}@{','.join(map(str, box.offset))}"


@dataclass(slots=True)
class StoredBox:
    """Location of a box of a logical tensor: tensor `key` of the safetensors file `file`."""

    file: str
    key: str
    box: Box


@dataclass(slots=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: str
    boxes: list[StoredBox]


@dataclass(frozen=True)
class FrozenParameter:
    """A parameter that was never trained. The checkpoint holds only its hash (see load_weights.py)."""

    shape: tuple[int, ...]
    hash: str


Files = dict[str, dict[str, Any]]  # name -> {"bytes", "xxh3"}; in versions 1 and 2, {"bytes", "sha256"}
Tensors = dict[tuple[str, str], StoredTensor]  # (kind, name) -> shape, dtype and boxes of the tensor


def is_count(value: Any) -> bool:
    """Return True if a parsed value is a valid size, position or number of steps."""
    return type(value) is int and 0 <= value < 1 << 62


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """Parse a JSON file. Raises CheckpointError if the file is missing, larger than `most_bytes`, or not JSON."""
    return _read(path, most_bytes)[1]


def _read(path: Path, most_bytes: int) -> tuple[bytes, Any]:
    with os_errors_as(CheckpointError, f"{path}: cannot be read"):
        content = read_regular(path, most_bytes, follow=False)
    if sum(map(content.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise CheckpointError(f"{path}: has more than the limit of {_MOST_VALUES} values")
    with os_errors_as(CheckpointError, f"{path}: not valid JSON", ValueError, RecursionError):
        return content, json.loads(content.decode("utf-8", "surrogatepass"), object_pairs_hook=unique_keys)


def manifest_text(content: dict[str, Any]) -> bytes:
    """Return the text of a manifest.json with this content. The SHA-256 hash at the end covers all text before it."""
    text = json.dumps({"format": FORMAT, "version": VERSION} | content, indent=1).encode()
    body = text.removesuffix(b"\n}") + _SUM_BEGINS
    return body + hashlib.sha256(body).hexdigest().encode() + _SUM_ENDS


def read_manifest(folder: Path) -> tuple[Tensors, Files, dict[str, FrozenParameter]]:
    """Return the tensors, the files and the frozen parameters in the manifest of `folder`.

    Raises CheckpointError if the manifest is missing, differs from the text that was written, is malformed or names a
    path outside the folder; if the boxes of a tensor do not tile it exactly once; or if the boxes in a file are
    together larger than the file. Raises IncompatibleCheckpointError if the manifest is intact but this release cannot
    read its version.
    """
    path = folder / MANIFEST
    text, manifest = _read(path, MOST_BYTES)
    body, begins, end = text.rpartition(_SUM_BEGINS)
    # Verify first: before that, no value can be trusted, not even the version.
    intact = end == hashlib.sha256(body + begins).hexdigest().encode() + _SUM_ENDS
    try:
        if not intact and ("sha256" in manifest or (manifest["format"], manifest["version"]) != (FORMAT, 1)):
            raise CheckpointError(f"{path}: contents do not match the SHA-256 checksum in it")
        if intact and (manifest["format"] != FORMAT or manifest["version"] not in (2, VERSION)):
            raise IncompatibleCheckpointError(
                f"{path}: this release cannot read format {show(manifest['format'])} version "
                f"{show(manifest['version'])}"
            )
        files = {name: _file(name, entry) for name, entry in manifest["files"].items()}
        tensors = {
            (_name(kind), _name(name)): _tensor(entry)
            for kind, group in manifest["tensors"].items()
            for name, entry in group.items()
        }
        frozen = {
            _name(name): FrozenParameter(_counts(entry["shape"]), _name(entry["hash"]))
            for name, entry in manifest.get("frozen", {}).items()
        }
    except ValueError as error:
        raise CheckpointError(f"{path}: malformed manifest ({error})") from None
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: malformed manifest ({error!r})") from None
    if STATE not in files:
        raise CheckpointError(f"{path}: does not list {STATE}")
    _check_boxes(path, files, tensors)
    if both := [name for name in frozen if ("param", name) in tensors]:
        raise CheckpointError(f"{path}: {both[0]} is listed both as frozen and as stored")
    return tensors, files, frozen


def _check_boxes(path: Path, files: Files, tensors: Tensors) -> None:
    held = dict.fromkeys(files, 0)
    seen = set[tuple[str, str]]()
    for (kind, name), stored in tensors.items():
        for where in stored.boxes:
            if where.file not in held:
                raise CheckpointError(f"{path}: {kind} {name} is in {where.file!r}, which the manifest does not list")
            if where.key != (key := box_key(kind, name, stored.shape, where.box)):
                raise CheckpointError(f"{path}: a box of {kind} {name} has the key {where.key}, expected {key}")
            if (where.file, where.key) in seen:
                raise CheckpointError(f"{path}: two boxes in {where.file} have the key {where.key}")
            seen.add((where.file, where.key))
            held[where.file] += where.box.numel * STORED_DTYPES[stored.dtype].itemsize
        if problem := check_cover([where.box for where in stored.boxes], stored.shape):
            raise CheckpointError(f"{path}: {kind} {name}: {problem}")
    for file, size in held.items():
        if size > files[file]["bytes"]:
            raise CheckpointError(
                f"{path}: the boxes in {file} have {size} bytes, more than the file's {files[file]['bytes']}"
            )


def _file(name: str, entry: Any) -> dict[str, Any]:
    if not _SAFE_NAME.fullmatch(name):
        raise ValueError(f"{show(name)} is not a valid name of a file in a checkpoint")
    size = _count(entry["bytes"])
    if "sha256" in entry:
        return {"bytes": size, "sha256": _name(entry["sha256"])}
    sums = entry["xxh3"]
    if not isinstance(sums, str) or len(sums) != DIGITS * -(-size // CHUNK):
        raise ValueError(f"{show(sums)} are not the checksums of {size} bytes")
    return {"bytes": size, "xxh3": sums}


def _tensor(entry: Any) -> StoredTensor:
    if entry["dtype"] not in STORED_DTYPES:
        raise ValueError(f"{show(entry['dtype'])} is not a dtype that checkpoints can store")
    boxes = [
        StoredBox(sys.intern(_name(file)), _name(key), Box(_counts(offset), _counts(shape)))
        for file, key, offset, shape in entry["boxes"]
    ]
    return StoredTensor(_counts(entry["shape"]), entry["dtype"], boxes)


def _counts(values: Any) -> tuple[int, ...]:
    """Check a shape or an offset; the number of dimensions and the product of the values are limited."""
    if not isinstance(values, list):
        raise ValueError(f"{show(values)} is not a list")
    counts = tuple(map(_count, values))
    if len(counts) > _MOST_DIMENSIONS or not is_count(math.prod(n or 1 for n in counts)):
        raise ValueError(f"{show(counts)} is too large a shape")
    return counts


def _count(value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"{show(value)} is not a size")
    return value


def _name(value: Any) -> str:
    """Check that a name is printable, short, and not the key that safetensors reserves."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > _LONGEST_NAME or value == "__metadata__":
        raise ValueError(f"{show(value)} is not a name")
    return value
