"""Compare a runner's tensors with the reference's tensors, box by box, without gathering them."""

import hashlib
import math
import sys
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from crosstrain import Batch, Box, Callback, MatrixOptimizer, MicroBatch, Piece, Shard, Step, step_folder
from crosstrain.checkpoint.checkpointer import Checkpointer
from crosstrain.checkpoint.files import Reader
from crosstrain.training.trainer import Trainer

from .forward import Activations, Routing
from .tolerance import Record

Products = list[float]  # pairwise dot products of vectors: [aa, ab, ac, bb, bc, cc] for a, b and c
# (name, box) -> (squared norm, dot products, types that can hold all values, hash), on one rank
Held = dict[tuple[str, Box], tuple[float, Products, set[str], int]]

_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_EPSILONS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}  # relative rounding error


class Probe(Callback):
    """Measures each step of a run after the backward and after the update.

    With `write`, the run is the reference, and saves its gradients and state as boxes in `folder`. Other runs compare
    their tensors with these boxes. `noise` measures the reference's noise: of "products", with weights perturbed by
    rounding errors of the compute dtype in each forward, or of "sums", with gradients perturbed by those of fp32.
    """

    def __init__(
        self, trainer: Trainer, folder: Path, *, write: bool, noise: Literal["products", "sums"] | None
    ) -> None:
        super().__init__(None, trainer)
        self.runner, self.write, self.noise, self.step = trainer.runner, write, noise, trainer.state.step
        self.group = self.runner.world.twin()
        self.activations, self.routing = Activations(self.runner.model, self.group), Routing(self.runner)
        self.steps: list[dict[str, Any]] = []
        self._files = {
            kind: Checkpointer(folder / kind, self.group, lambda *_: None, keep_last=None)
            for kind in ("gradients", "state")
        }
        self._keep("state", self.runner.held.shards())

    def before_step(self, batch: Step) -> None:
        self.activations.clear()
        self.routing.clear()
        if self.noise == "products":
            # Perturb weights by up to one rounding error of the compute dtype, until the backward has ended.
            weights = [shard for shard in self.runner.held.shards() if shard.kind == "param"]
            self._unperturbed = [(piece, piece.data.clone()) for shard in weights for piece in shard.pieces]
            self._round_otherwise(weights, lambda _: _EPSILONS[self.runner.precision.dtype])
            self.runner.loaded()

    def after_backward(self, batch: Step, loss: float) -> None:
        """Record learning rates and gradients."""
        if self.noise == "products":
            for piece, value in self._unperturbed:
                piece.data.copy_(value)
            self.runner.loaded()
        optimizer = self.runner.optimizer
        assert optimizer is not None
        self.step += 1
        shards = self.runner.held.gradients()
        for piece in (piece for shard in shards for piece in shard.pieces):
            piece.data = piece.data.detach().to("cpu", torch.float32) / self.runner.gradient_scale
        self._keep("gradients", shards)
        self.steps.append(
            {
                "rates": sorted({group["lr"] / group.get("lr_scale", 1.0) for group in optimizer.param_groups}),
                "gradients": self.measure(shards, [self.reader("gradients")], lambda g, r: [g - r[0], r[0]]),
                "projections": self.project(shards),
                "activations": self.activations.means(),
                "training": self.runner.model.training,
            }
        )
        if self.noise == "sums":
            # Sums differ by about 2**-23. More is added, so that every tensor has several weights whose bf16 rounding
            # changes: with few such weights, chance would decide how large the noise is.
            self._round_otherwise(self.runner.held.gradients(), lambda size: 2.0**-20)
        if self.noise and isinstance(optimizer, MatrixOptimizer):
            # Rounding alters a few elements of each tensor. Changing only the last bits would be enough for large
            # matrices, but would rarely have an effect in small ones.
            self._round_otherwise(self.runner.held.gradients(), lambda size: 8 * _EPSILONS[optimizer.dtype] / size)

    def after_update(self, moments: bool) -> None:
        """Record the weights and, with `moments`, the optimizer state. Collective."""
        shards = self.runner.held.shards()
        parameters = [s for s in shards if s.kind == "param"]
        self._keep("state", shards if moments else parameters)
        now, before = self.reader("state"), self.reader("state", self.step - 1)

        def products(share: float, w: Tensor, r: list[Tensor]) -> list[Tensor]:
            # Adam's update follows the sign of a gradient. Near zero, rounding decides that sign.
            sure = (r[2] == 0) | (r[2].abs() >= share * r[2].square().mean().sqrt())
            return [(w - r[0]) * sure, r[0] - r[1], r[1]]

        known = [s for s in parameters if (s.kind, s.name) in now.tensors]
        readers, dtypes = [now, before, self.reader("gradients")], {"weights": self.runner.precision.dtype}
        if dtypes["weights"] != torch.float32:
            dtypes["narrow_weights"] = torch.float32
        for key, dtype in dtypes.items():
            share = 0.0 if self.noise or self.runner.run.bitwise.enabled else _EPSILONS[dtype] ** 0.5
            self.steps[-1][key] = self.measure(known, readers, partial(products, share))
        if moments:
            self.steps[-1] |= self.against(now, shards)

    def against(self, there: Reader, shards: list[Shard]) -> Record:
        """Compare state in memory with a checkpoint; return missing and extra tensors, and measurements. Collective."""
        here = set().union(*self.group.all_gather({(s.kind, s.name) for s in shards}))
        missing = [f"{kind} of {name}" for kind, name in there.tensors.keys() - here]
        by_kind = {}
        for kind in sorted({kind for kind, _ in here & there.tensors.keys()}):
            own = [s for s in shards if s.kind == kind and (kind, s.name) in there.tensors]
            by_kind[kind] = self.measure(own, [there], lambda a, r: [a - r[0], r[0]])
            missing += [f"a part of {kind} of {name}" for name in by_kind[kind]["partial"]]
        return {
            "missing": sorted(missing),
            "surplus": sorted(f"{kind} of {name}" for kind, name in here - there.tensors.keys()),
            "state": by_kind,
        }

    def reader(self, kind: str, step: int | None = None) -> Reader:
        return Reader.open(step_folder(self._files[kind].root, self.step if step is None else step))

    def _keep(self, kind: str, shards: list[Shard]) -> None:
        if self.write:
            self._files[kind].save(self.step, shards, {"step": self.step}, background=False)
            self._files[kind].wait()

    # ---- sums over sharded tensors

    def measure(
        self, shards: Iterable[Shard], readers: list[Reader], vectors: Callable[[Tensor, list[Tensor]], list[Tensor]]
    ) -> Record:
        """Measure tensors against the readers' tensors. Collective.

        `vectors` gets a piece's data and the data of the same box from every reader. A reader without a tensor of the
        piece's kind supplies the gradient, or zeros if it has no gradient either. The first vector that `vectors`
        returns must be the difference.

        products: parameter -> dot products of the vectors; each element is counted once.
        hashes: parameter -> hash of all bits; sharding does not change it.
        off: parameter -> ranks with more than four times the smallest difference of any rank.
        apart: parameter -> largest distance between copies, relative to their norm.
        copies: parameter -> number of ranks that hold the parameter.
        rounded: parameter -> `bfloat16` or `float16`, if all values have this type's precision.
        partial: parameters with elements that no rank holds.
        idle: ranks that hold no elements.
        """
        mine, left = Held(), dict[str, int]()
        for shard in shards:
            left[shard.name] = math.prod(shard.shape)
            there = [[Piece(p.box, torch.zeros(p.box.shape)) for p in shard.pieces] for _ in readers]
            for reader, pieces in zip(readers, there, strict=True):
                kind = shard.kind if (shard.kind, shard.name) in reader.tensors else "grad"
                if (kind, shard.name) in reader.tensors:
                    reader.fill([Shard(kind, shard.name, shard.shape, pieces)])
            for piece, *others in zip(shard.pieces, *there, strict=True):
                data = piece.data.detach().cpu().double()
                found = vectors(data, [other.data.double() for other in others])
                mine[shard.name, piece.box] = (
                    _dot(data, data),
                    [_dot(a, b) for i, a in enumerate(found) for b in found[i:]],
                    {name for name, dtype in _TYPES.items() if torch.equal(data.to(dtype).double(), data)},
                    _hash(shard, piece),
                )
        return _merged(self.group.all_gather(mine), self.group.all_gather(left))

    def project(self, shards: Iterable[Shard]) -> dict[str, float]:
        """Project each tensor onto random signs; sharding does not change the result. Collective."""
        bits = partial(torch.randint, 0, 2, dtype=torch.int8)
        mine = {(s.name, p.box): _dot(p.data, _drawn(bits, s, p.box) * 2 - 1) for s in shards for p in s.pieces}
        boxes = {key: value for held in self.group.all_gather(mine) for key, value in held.items()}
        return {name: sum(value for (n, _), value in boxes.items() if n == name) for name, _ in boxes}

    # ---- for the reference and its noise

    def parts(self, step: list[MicroBatch], num_targets: int, router_losses: bool = True) -> list[dict[str, float]]:
        """Project the gradient of each micro batch separately, weighted as in the step. Needs a single rank."""
        out, without = [], ExitStack()
        for routers in [] if router_losses else self.runner.model.structure.routers():
            without.enter_context(patch.multiple(routers, coefficient=0.0, z_coefficient=0.0))
        with without:
            for micro_batch in step:
                self.runner.forward_backward([micro_batch], num_targets)
                out.append(
                    {
                        name: value / self.runner.gradient_scale
                        for name, value in self.project(self.runner.held.gradients()).items()
                    }
                )
                self.runner.model.zero_grad(set_to_none=True)
        return out

    def _round_otherwise(self, shards: Iterable[Shard], change: Callable[[int], float]) -> None:
        """Change tensors by up to `change(number of elements)`, relative to each element."""
        for shard, piece in ((s, p) for s in shards for p in s.pieces):
            noise = 2 * _drawn(torch.rand, shard, piece.box, self.step) - 1
            piece.data.mul_(1 + change(math.prod(shard.shape)) * noise.to(piece.data.device))


def _merged(gathered: list[Held], sizes: list[dict[str, int]]) -> Record:
    """Merge the boxes of all ranks into the result of `measure`; `sizes`: parameter -> elements, for each rank."""
    left = {name: size for own in sizes for name, size in own.items()}
    few = sum(left.values()) < 64 * len(gathered)  # too few elements for every rank to hold some
    idle = [] if few else [rank for rank, held in enumerate(gathered) if not any(box.numel for _, box in held)]
    total, apart, copies = dict[str, Products](), dict[str, float](), dict[str, int]()
    own: dict[str, dict[int, float]] = {}  # parameter -> rank -> squared difference
    types, hashes = dict[str, set[str]](), dict[str, int]()
    for name, box in {key: None for held in gathered for key in held}:
        ranks = {rank: held[name, box] for rank, held in enumerate(gathered) if (name, box) in held}
        (square, first, _, code), parts = next(iter(ranks.values())), own.setdefault(name, {})
        hashes[name] = (hashes.get(name, 0) + code) % 2**64
        total[name] = [a + b for a, b in zip(first, total.get(name, [0.0] * len(first)), strict=True)]
        left[name], copies[name] = left[name] - box.numel, len(ranks)
        for rank, (other, products, possible, others) in ranks.items():
            if other:  # zeros say nothing about the type
                types[name] = types.get(name, {*_TYPES}) & possible
            parts[rank] = parts.get(rank, 0.0) + products[0]
            far = max(abs(math.sqrt(a) - math.sqrt(b)) for a, b in ((square, other), (first[0], products[0])))
            bits = sys.float_info.min if others != code else 0.0  # above zero also if the norms are equal
            apart[name] = max(apart.get(name, 0.0), bits, far / max(math.sqrt(square), 1e-30))
    off = {n: [r for r, d in p.items() if not d <= 16 * min(p.values()) + 1e-30] for n, p in own.items()}
    return {
        "products": total,
        "hashes": hashes,
        "off": {name: ranks for name, ranks in off.items() if ranks},
        "apart": apart,
        "copies": copies,
        "rounded": {name: sorted(possible)[0] for name, possible in types.items() if possible},
        "partial": sorted(name for name, size in left.items() if size > 0),
        "idle": idle,
    }


def _dot(a: Tensor, b: Tensor) -> float:
    return (a.detach().cpu().double() * b.cpu().double()).sum().item()


def _hash(shard: Shard, piece: Piece) -> int:
    """Return a sum of hashes of a piece's elements, as fp32 numbers, and of their places in the whole tensor.

    A sum of whole numbers modulo 2**64 does not depend on the order, so hashes of pieces can be added. The hash of an
    element is the output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014).
    """
    places = torch.arange(math.prod(shard.shape)).view(shard.shape)[piece.box.slices_in(Box.whole(shard.shape))]
    bits = piece.data.detach().to("cpu", torch.float32).contiguous().view(torch.int32)
    mixed = (places << 32) ^ bits
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return int((mixed ^ (mixed >> 31)).sum()) % 2**64


def _drawn(draw: Callable[..., Tensor], shard: Shard, box: Box, seed: int = 0) -> Tensor:
    """Draw a tensor of the shard's shape, seeded by the shard's name and `seed`, and return the part in `box`."""
    generator = torch.Generator().manual_seed(zlib.crc32(shard.name.encode()) + seed)
    return draw(size=shard.shape, generator=generator)[box.slices_in(Box.whole(shard.shape))]


def digests(batch: Batch) -> dict[str, str]:
    """Return a dict from the tensor fields of a batch to short hashes."""
    return {
        key: hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
        for key, value in batch.items()
        if isinstance(value, Tensor) and value.dtype != torch.bfloat16
    }
