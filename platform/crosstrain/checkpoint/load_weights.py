"""Fill a model's weights from a checkpoint, from pretrained folders, or with initial values.

A checkpoint contains only hashes of the frozen parameters. When a checkpoint is loaded, these parameters are read from
the pretrained folders, and their hashes are compared, to detect weights other than those that the run started from.
"""

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from crosstrain.checkpoint.boxes import Box, Piece, Shard, whole_pieces
from crosstrain.checkpoint.files import OTHER, Reader
from crosstrain.checkpoint.manifest import MANIFEST, FrozenParameter
from crosstrain.config.pretrained_folder import NOTE
from crosstrain.distributed.group import Group
from crosstrain.modeling.base import Model
from crosstrain.modeling.weights import Place, Source, Stack, names_at
from crosstrain.utils.errors import CheckpointError, ConfigError
from crosstrain.utils.files import read_regular
from crosstrain.utils.rng import generator

_ELEMENTS = 1 << 20  # elements hashed at a time; hashing an element takes tens of bytes of memory
_WORD = (1 << 64) - 1
_NOTE_BYTES = 1 << 12


@dataclass
class PretrainedWeights:
    """The pretrained folders with the model's starting weights and its frozen parameters."""

    parts: list[tuple[Source, Reader]]

    @staticmethod
    def of(model: Model) -> "PretrainedWeights":
        """Open the model's folders. Raises CheckpointError as `open_weights` does."""
        return PretrainedWeights([(source, open_weights(source.folder)) for source in model.weights.sources()])

    def verify(self) -> None:
        """Raise CheckpointError for a damaged checkpoint. Hugging Face folders have no checksums to check."""
        for _, reader in self.parts:
            reader.verify()

    def summary(self, names: Collection[str]) -> list[str]:
        """Return lines for the log: how many parameters each folder provides, and how many of its tensors are not used.

        Raises CheckpointError if a folder lacks a parameter, or if the model does not use all parameters of an earlier
        run.
        """
        left, found = set(names), dict[Path, tuple[int, set[str]]]()
        for source, reader in self.parts:
            mine, there = set(filter(source.covers, left)), reader.names("param")
            left -= mine
            used = set[str]().union(*(names_at(source.place(name, there)) for name in mine))
            if lacking := used - there:
                frozen = lacking & reader.frozen.keys() and ", which was frozen; set its pretrained weights in `model`"
                raise CheckpointError(f"{reader.folder}: has no parameter {min(lacking)}{frozen or ''}")
            if source.of_model:
                _check_used(reader, there - used)
            count, unused = found.get(reader.folder, (0, there))
            found[reader.folder] = count + len(mine), unused - used
        lines = [
            f"{count} parameters are initialized from the weights in {folder}{_note(folder)}"
            + (f"; {len(unused)} of its parameters are not used, such as {min(unused)}" if unused else "")
            for folder, (count, unused) in found.items()
        ]
        new = [f"{len(left)} parameters are newly initialized, such as {min(left)}"] if left and lines else []
        return lines + new

    def covers(self, name: str) -> bool:
        """Return True for a parameter that comes from one of the folders."""
        return any(source.covers(name) for source, _ in self.parts)

    def fill(self, shards: list[Shard]) -> dict[str, Source]:
        """Fill the parameter shards that a folder covers, and return parameter name -> source.

        Raises CheckpointError as `Reader.fill` does.
        """
        filled = dict[str, Source]()
        for source, reader in self.parts:
            names = reader.names("param")
            mine = [s for s in shards if s.name not in filled and source.covers(s.name)]
            reader.fill(part for s in mine for part in _as_published(s, source.place(s.name, names)))
            filled |= dict.fromkeys((s.name for s in mine), source)
        return filled

    def as_published(self, shards: list[Shard]) -> Iterator[Shard]:
        """Yield the shards in fp32, one at a time. Shards in lower precision are read from the folders again."""
        for shard in shards:
            if all(p.data.dtype == torch.float32 for p in shard.pieces):
                yield shard
            else:
                pieces = [Piece(p.box, torch.empty_like(p.data, dtype=torch.float32)) for p in shard.pieces]
                exact = Shard(shard.kind, shard.name, shard.shape, pieces)
                self.fill([exact])
                yield exact


def _note(folder: Path) -> str:
    """Return what the program that converted a folder says about its weights; an empty string for other folders."""
    with suppress(OSError):
        return f", {read_regular(folder / NOTE, _NOTE_BYTES).decode('utf-8', 'replace').strip()}"
    return ""


def fill_quantized(model: Model, pretrained: PretrainedWeights) -> dict[str, FrozenParameter]:
    """Read, one at a time, the parameters that a model keeps quantized, and quantize them. Returns their hashes.

    Raises ConfigError for a parameter that no pretrained folder covers.
    """
    hashes = {}
    for name, parameter in model.weights.quantized().items():
        if not pretrained.covers(name):
            raise ConfigError(f"model.adapter: {name} is quantized, so the model needs pretrained weights")
        value, shape = torch.empty(parameter.shape), tuple(parameter.shape)
        pretrained.fill([Shard("param", name, shape, whole_pieces(value, shape))])
        hashes[name] = FrozenParameter(shape, f"{fingerprint(value, Box.whole(shape), shape):016x}")
        parameter.quantize(value)
    return hashes


def open_weights(folder: Path, weights: str | None = None) -> Reader:
    """Open a checkpoint or a Hugging Face folder. For `weights`, see `Reader.open`.

    Raises CheckpointError if `folder` is not a checkpoint or Hugging Face folder, or does not contain these weights.
    """
    reader = Reader.open(folder) if os.path.lexists(folder / MANIFEST) else Reader.open_hugging_face(folder)
    return reader.choose(weights)


def _as_published(shard: Shard, place: Place) -> Iterator[Shard]:
    """Convert a shard of the model to shards of the pretrained tensors at `place`. The memory is shared."""
    if isinstance(place, str):
        yield Shard(shard.kind, place, shard.shape, shard.pieces)
    elif isinstance(place, Stack):
        shape = (shard.shape[1] // len(place.names[0]), *shard.shape[2:])
        for n, parts in enumerate(place.names):
            for part, name in enumerate(parts):
                box = Box((n, part * shape[0], *[0] * len(shape[1:])), (1, *shape))
                pieces = [
                    Piece(Box((c.offset[1] - box.offset[1], *c.offset[2:]), c.shape[1:]), p.part(c).squeeze(0))
                    for p in shard.pieces
                    if (c := p.box.intersect(box)) is not None
                ]
                if pieces:
                    yield Shard(shard.kind, name, shape, pieces)
    else:
        pieces = [
            Piece(Box((p.box.offset[0] + place.first, *p.box.offset[1:]), p.box.shape), p.data) for p in shard.pieces
        ]
        yield Shard(shard.kind, place.name, (place.rows, *shard.shape[1:]), pieces)


def fill_initial(model: Model, shards: Iterable[Shard], seed: int) -> None:
    """Fill parameter shards with initial values that depend only on seed, canonical name and logical shape.

    Only one logical tensor exists at a time, so a rank needs memory for its share and the largest tensor.
    """
    for shard in shards:
        if shard.kind == "param" and shard.pieces:
            value = torch.empty(shard.shape)
            model.weights.initialize(shard.name, value, generator(seed, shard.name, *shard.shape))
            for piece in shard.pieces:
                piece.data.copy_(value[piece.box.slices_in(Box.whole(shard.shape))])


def load_shards(
    reader: Reader,
    shards: list[Shard],
    pretrained: PretrainedWeights | None = None,
    names: Collection[str] | None = None,
) -> set[str]:
    """Fill shards from a checkpoint, or from `pretrained` for frozen parameters. Returns the frozen parameters' names.

    No tensor is gathered. If other ranks hold other parameters, pass all the model's parameter names as `names`.
    Raises CheckpointError if model and checkpoint have different parameters, or if a frozen parameter has no pretrained
    weights. To compare the frozen parameters with the checkpoint's hashes, call `check_frozen`.
    """
    pretrained = pretrained or PretrainedWeights([])
    known = {s.name for s in shards if s.kind == "param"} if names is None else set(names)
    _check_used(reader, (reader.names("param") | reader.frozen.keys()) - known)
    borrowed = [s for s in shards if s.kind == "param" and s.name in reader.frozen]
    if missing := [s.name for s in borrowed if not pretrained.covers(s.name)]:
        raise CheckpointError(
            f"{reader.folder}: {missing[0]} was frozen and is not in the checkpoint; set its pretrained "
            f"weights in `model`"
        )
    for shard in shards:
        untrained = shard.kind != "param" and (shard.kind, shard.name) not in reader.tensors
        if untrained and shard.name not in reader.frozen and ("param", shard.name) in reader.tensors:
            raise CheckpointError(
                f"{reader.folder}: has no {shard.kind} for {shard.name}, because it was not trained; reset the "
                f"optimizer state with run.resume_optimizer=false"
            )
    pretrained.fill(borrowed)
    # The checkpoint contains no optimizer state of frozen parameters; the state of these parameters starts at zero.
    reader.fill([s for s in shards if s.name not in reader.frozen])
    _check_shared(reader, shards)
    return {s.name for s in borrowed}


def _check_used(reader: Reader, extra: set[str]) -> None:
    """Raise CheckpointError if `extra`, the checkpoint's parameters that the model lacks, is not empty."""
    if extra:
        raise CheckpointError(
            f"{reader.folder}: has {len(extra)} parameters that the model lacks, such as {min(extra)}{OTHER}"
        )


def _check_shared(reader: Reader, shards: list[Shard]) -> None:
    """Raise CheckpointError if parameters that share an optimizer scalar here have different ones in the checkpoint."""
    scalars = [s for s in shards if s.kind != "param" and s.shape == () and s.pieces]
    values = [torch.zeros_like(s.pieces[0].data, device="cpu") for s in scalars]
    copies = [Shard(s.kind, s.name, (), whole_pieces(v, ())) for s, v in zip(scalars, values, strict=True)]
    reader.fill([copy for copy in copies if copy.name not in reader.frozen])
    first: dict[int, tuple[str, float]] = {}
    for shard, value in zip(scalars, values, strict=True):
        name, known = first.setdefault(shard.pieces[0].data.data_ptr(), (shard.name, value.item()))
        if known != value.item():
            raise CheckpointError(
                f"{reader.folder}: the optimizer's {shard.kind} is {known:g} for {name} and {value.item():g} for "
                f"{shard.name}, but this runner keeps one value for both; use a runner such as ddp or fsdp, or "
                f"reset the optimizer state with run.resume_optimizer=false"
            )


def check_frozen(reader: Reader, hashes: dict[str, FrozenParameter]) -> None:
    """Raise CheckpointError if a parameter's hash differs from the hash in the checkpoint."""
    for name, now in hashes.items():
        if reader.frozen.get(name, now) != now:
            raise CheckpointError(
                f"{reader.folder}: {name} is frozen and differs from the parameter in the trained run; check that "
                f"`model` names the same pretrained weights"
            )


def fingerprints(shards: Iterable[Shard], group: Group) -> dict[str, FrozenParameter]:
    """Hash every parameter that has pieces on the ranks of `group`. Collective.

    A parameter's hash is the sum, modulo 2^64, of its elements' hashes; an element's hash is computed from its position
    and value. Ranks can therefore add up the hashes of their pieces. The hash detects different weights, but does not
    protect against an attacker.
    """
    mine = {(s.name, s.shape, p.box): fingerprint(p.data, p.box, s.shape) for s in shards for p in s.pieces}
    boxes = {key: value for held in group.all_gather(mine) for key, value in held.items()}
    sums: dict[tuple[str, tuple[int, ...]], int] = {}
    for (name, shape, _), value in boxes.items():
        sums[name, shape] = (sums.get((name, shape), 0) + value) & _WORD
    return {name: FrozenParameter(shape, f"{value:016x}") for (name, shape), value in sums.items()}


def fingerprint(data: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """Return the contribution of a box's `data` to the hash of the box's tensor. `data` is converted to fp32."""
    total = 0
    rows = max(1, _ELEMENTS * data.shape[0] // max(1, data.numel())) if data.ndim else 1
    for start in range(0, data.shape[0] if data.ndim else 1, rows):
        part = data[start : start + rows] if data.ndim else data
        position = torch.zeros((), dtype=torch.int64, device=data.device)
        stride = 1
        for d in reversed(range(part.ndim)):
            first = box.offset[d] + (start if d == 0 else 0)
            index = torch.arange(first, first + part.shape[d], device=data.device) * stride
            position = position + index.view(-1, *[1] * (part.ndim - 1 - d))
            stride *= shape[d]
        bits = part.detach().float().contiguous().view(torch.int32).to(torch.int64)
        total += int(_mix(position * 0x9E3779B97F4A7C1 + bits).sum())
    return total & _WORD


def _mix(z: torch.Tensor) -> torch.Tensor:
    """Compute `rng.splitmix64` in torch. int64 products wrap around; masks undo the sign extension of right shifts."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ ((z >> shift) & (_WORD >> shift))) * (factor - (1 << 64))
    return z ^ ((z >> 31) & (_WORD >> 31))
