"""Tensor parallelism by torch's own styles: modules compute with DTensors, and their dispatch communicates."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, loss_parallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from crosstrain import (
    PLAIN,
    Batch,
    Box,
    Capabilities,
    ForwardMode,
    Group,
    Head,
    HeldState,
    Logits,
    MakeOptimizer,
    MicroBatch,
    Model,
    Piece,
    Runner,
    registry,
)


class _Head(Head):
    """A head that computes all logits as a DTensor, and torch's parallel loss."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor | None, vocab_size: int, logits: Logits, mode: ForwardMode
    ) -> Tensor:
        assert labels is not None, "trains only"
        assert logits == Logits()
        whole = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        scores = nn.functional.linear(whole, weight).float().view(-1, weight.shape[0])
        loss = nn.functional.cross_entropy(scores, labels.reshape(-1), ignore_index=-100, reduction="sum")
        return loss.redistribute(placements=[Replicate()]).to_local()


@registry.register_runner("dtensor_styles")
class DTensorStyles(Runner):
    """The tensor-parallel plan of GPT-2 under torch's own styles."""

    capabilities = Capabilities(needs_process_group=True)

    @classmethod
    def data_parallel_size(cls, options: Any, world_size: int) -> int:
        return 1

    def setup(self) -> None:
        super().setup()
        self.dp = Group()
        self.mesh = init_device_mesh(self.device.type, (self.world.size,))

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        body = model.lm.transformer
        for block in body.h:
            self._spread(
                block.attn.c_attn, _StridedShard(1, split_factor=3), _StridedShard(0, split_factor=3), Replicate()
            )
            self._spread(block.attn.c_proj, Shard(0), Replicate(), Shard(-1))
            self._spread(block.mlp.c_fc, Shard(1), Shard(0), Replicate())
            self._spread(block.mlp.c_proj, Shard(0), Replicate(), Shard(-1))
            block.attn.split_size //= self.mesh.size()
            for norm in (block.ln_1, block.ln_2):
                self._spread(norm, Replicate(), Replicate(), Replicate())
        self._spread(body.ln_f, Replicate(), Replicate(), Replicate())
        self._spread(body.wpe, Replicate(), None, Replicate())
        words = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        parallelize_module(body, self.mesh, {"wte": words})
        model.lm.lm_head.weight = body.wte.weight
        super().prepare(model, make_optimizer)

    def compute_loss(self, batch: Batch, mode: ForwardMode = PLAIN) -> Tensor:
        return super().compute_loss(batch, replace(mode, head=_Head(self.mesh)))

    def _spread(self, module: nn.Module, weight: Placement, bias: Placement | None, inputs: Placement) -> None:
        for name, placement in (("weight", weight), ("bias", bias)):
            if placement is not None:
                whole = distribute_tensor(getattr(module, name).detach(), self.mesh, [placement], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(whole))

        def enter(_: nn.Module, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return (DTensor.from_local(args[0], mesh, [inputs], run_check=False), *args[1:])

        def leave(_: nn.Module, out: DTensor, mesh: DeviceMesh) -> Tensor:
            summed = any(isinstance(p, Partial) for p in out.placements)
            return (out.redistribute(placements=[Replicate()]) if summed else out).to_local()

        distribute_module(module, self.mesh, None, partial(enter), partial(leave))

    @cached_property
    def held(self) -> HeldState:
        return _Strided(self)

    def forward_backward(self, micro_batches: list[MicroBatch], num_targets: int) -> float:
        with ExitStack() as stack:
            stack.enter_context(loss_parallel())
            return super().forward_backward(micro_batches, num_targets)


class _Strided(HeldState):
    def pieces(self, parameter: nn.Parameter, held: Tensor, shape: torch.Size) -> list[Piece]:
        if not isinstance(held, DTensor) or not isinstance(held.placements[0], _StridedShard):
            return super().pieces(parameter, held, shape)
        mesh, out, dim = held.device_mesh, [], held.placements[0].dim
        for part, data in enumerate(held.detach().to_local().chunk(3, dim)):
            offset = [0] * data.ndim
            offset[dim] = (part * mesh.size() + mesh.get_local_rank()) * data.shape[dim]
            out.append(Piece(Box(tuple(offset), tuple(data.shape)), data))
        return out
