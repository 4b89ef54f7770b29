"""A checkpoint as a plain Hugging Face model folder, whoever wrote it and however its tensors were cut.

Tensors go from the checkpoint's boxes to the new files one at a time, so that memory holds the largest of them, not
the model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crosstrain.checkpoint.boxes import Shard, whole_pieces
from crosstrain.checkpoint.files import Reader, fsync, write_safetensors
from crosstrain.checkpoint.frozen import Base, check_frozen, fingerprints
from crosstrain.checkpoint.manifest import DTYPES, read_json
from crosstrain.distributed.group import Group
from crosstrain.modeling.base import Merge
from crosstrain.utils.assets import MODEL_FILES, TOKENIZER_FILES
from crosstrain.utils.errors import CheckpointError, UserError
from crosstrain.utils.files import write_json

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
# Keys by which a configuration sends transformers for code, other weights or other files.
_REDIRECTIONS = {"auto_map", "custom_generate", "custom_pipelines", "init_inputs", "use_pretrained_backbone"}
_ENDS_OF_REDIRECTIONS = ("name_or_path", "_file", "_files")
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Exported:
    """What was written."""

    parameters: int
    bytes: int  # of tensors
    files: int  # that hold them
    architecture: str | None  # the transformers class that opens the folder, where the configuration says


def export(
    checkpoint: Path,
    output: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    progress: Callable[[str], None],
    base: Base | None = None,
    merges: dict[str, Merge] | None = None,
) -> Exported:
    """Write the model in `checkpoint`, which was verified, into the folder `output`, which appears when it is complete.

    `dtype` is what floating-point tensors become; None leaves them. `progress` is told each file and its size. `base`
    has the parameters that the checkpoint records without holding them, `merges` those that others are taken into.
    Raises UserError where `output` holds something or cannot be written, and CheckpointError for a malformed
    checkpoint.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"--output: {output} exists already and is not an empty folder; name another one")
    reader = Reader.open(checkpoint)
    final = output.absolute()
    temporary = final.with_name(f".{final.name}.export")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)  # what an earlier attempt left that was killed
        temporary.mkdir()
        exported = _write(_Source(reader, base, merges or {}), temporary, dtype, max_shard_bytes, progress)
        for path in (*temporary.iterdir(), temporary):
            fsync(path)
        os.rename(temporary, final)
        fsync(final.parent)
    except OSError as error:
        raise UserError(f"--output: {output} cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return exported


class _Source:
    """Where the parameters of a checkpoint come from: itself, or for frozen ones the pretrained weights."""

    def __init__(self, reader: Reader, base: Base | None, merges: dict[str, Merge]) -> None:
        self.reader, self.base, self.merges = reader, base, merges
        if reader.frozen and base is None:
            raise CheckpointError(
                f"{reader.folder}: {next(iter(reader.frozen))} was frozen and its source is not known"
            )

    def outlines(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Type and shape of every exported parameter, without memory."""
        here = {
            name: (t.shape, _BY_NAME[t.dtype]) for (kind, name), t in self.reader.tensors.items() if kind == "param"
        }
        here |= {name: (frozen.shape, torch.float32) for name, frozen in self.reader.frozen.items()}
        for name in {other for merge in self.merges.values() for other in merge.others}:
            del here[name]
        return {
            name: torch.empty(shape, dtype=dtype if dtype and there.is_floating_point else there, device="meta")
            for name, (shape, there) in here.items()
        }

    def read(self, name: str, outline: Tensor, memory: Tensor) -> Tensor:
        """The data of a parameter, in the type and shape of `outline`, at the beginning of `memory`."""
        value = memory[: _size(outline)].view(outline.dtype).view(outline.shape)
        shape = tuple(value.shape)
        if name in self.merges:
            merge = self.merges[name]
            return value.copy_(merge.combine(*map(self._whole, (name, *merge.others))))
        if name in self.reader.frozen:
            return value.copy_(self._whole(name))
        self.reader.fill([Shard("param", name, shape, whole_pieces(value, shape))])
        return value

    def _whole(self, name: str) -> Tensor:
        """A parameter in fp32."""
        frozen = self.reader.frozen.get(name)
        shape = tuple(frozen.shape if frozen else self.reader.tensors["param", name].shape)
        whole = torch.empty(shape)
        shard = Shard("param", name, shape, whole_pieces(whole, shape))
        if frozen is None:
            self.reader.fill([shard])
        else:
            assert self.base is not None
            self.base.fill([shard])
            check_frozen(self.reader, fingerprints([shard], Group()))
        return whole


def _write(
    source: _Source, folder: Path, dtype: torch.dtype | None, max_shard_bytes: int, progress: Callable[[str], None]
) -> Exported:
    tensors = source.outlines(dtype)
    shards = _shards(tensors, max_shard_bytes)
    memory = torch.empty(max(map(_size, tensors.values()), default=0), dtype=torch.uint8)  # of one tensor after another
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        outlines = {name: tensors[name] for name in names}
        entry = write_safetensors(
            folder / file, outlines, produce=lambda name: source.read(name, tensors[name], memory)
        )
        weight_map |= dict.fromkeys(names, file)
        progress(f"{file}  {entry['bytes'] / 1e6:,.1f} MB")
    size = sum(map(_size, tensors.values()))
    if len(shards) > 1:
        write_json(folder / _INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    there = source.reader
    for name in there.files:
        if name in TOKENIZER_FILES | MODEL_FILES:
            _copy(there.folder / name, folder / name)
    config = _write_config(folder, dtype)
    return Exported(sum(t.numel() for t in tensors.values()), size, len(shards), _architecture(config))


def _shards(tensors: dict[str, Tensor], limit: int) -> list[list[str]]:
    """Names by file, in order: as many to a file as `limit` bytes hold, but at least one."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, tensor in tensors.items():
        if shards[-1] and _size(tensor) > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= _size(tensor)
    return shards


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _write_config(folder: Path, dtype: torch.dtype | None) -> Any:
    """The model's configuration, saying `dtype` if given; None where there is none."""
    path = folder / _CONFIG
    if not path.exists():
        return None
    config = read_json(path)
    if dtype is not None and isinstance(config, dict):
        config.pop("torch_dtype", None)  # what transformers called it before version 4.56
        config["dtype"] = str(dtype).removeprefix("torch.")
        write_json(path, config)
    return config


def _copy(source: Path, target: Path) -> None:
    """Copy a file of a model's folder, a configuration without its redirections."""
    if not source.name.endswith("config.json"):
        shutil.copyfile(source, target)
        return
    try:
        content = json.dumps(_without_redirections(read_json(source)), indent=2, ensure_ascii=False)
        target.write_text(content + "\n", encoding="utf-8")
    except (RecursionError, UnicodeEncodeError) as error:
        raise CheckpointError(f"{source}: not a configuration ({error})") from None


def _without_redirections(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_redirections(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_redirections(item)
        for key, item in value.items()
        if key not in _REDIRECTIONS and not key.endswith(_ENDS_OF_REDIRECTIONS)
    }


def _architecture(config: Any) -> str | None:
    """The class of transformers that the configuration says it is of; None where there is none of that name."""
    named = config.get("architectures") if isinstance(config, dict) else None
    first = named[0] if isinstance(named, list) and named else None
    if not isinstance(first, str):
        return None
    import transformers

    try:
        found = getattr(transformers, first, None)
    except Exception:  # of a module that cannot be imported here
        return None
    return first if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None
