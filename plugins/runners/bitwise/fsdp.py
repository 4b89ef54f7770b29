"""Bitwise reproducible FSDP: ranks reduce each micro batch's gradients to shards, and add their shards in a tree."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from crosstrain import ConfigError, Group, Layout, MakeOptimizer, Model, PlanContext, RunOptions

from ..fsdp import FSDPRunner
from .backend import BACKENDS
from .base import Rounded
from .gradients import WholeGradients


class BitwiseFSDP(Rounded, FSDPRunner):
    """FSDP2 on process groups whose sums are fixed trees."""

    capabilities: ClassVar = replace(FSDPRunner.capabilities, backends=BACKENDS, draws_parts=True)

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        super().check(options, run)
        if options.shard_size is not None or options.reduce_dtype != "fp32" or options.cpu_offload:
            raise ConfigError("run.bitwise: fsdp must not set shard_size, cpu_offload or reduce_dtype")

    @classmethod
    def layouts(cls, options: Any, at: PlanContext) -> list[Layout]:
        return super().layouts(replace(options, sync_each_micro_batch=True), at)

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        super().prepare(model, make_optimizer)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # sum, do not average
                module.set_force_sum_reduction_for_comms(True)
        if self.world.size == 1:  # FSDP2 then reduces nothing
            self.gradients = WholeGradients([p for p in model.parameters() if p.requires_grad], self.world, Group())

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        with super().gradient_sync(last):
            self.module.set_requires_gradient_sync(True)
            yield
        if self.gradients is not None:
            self.gradients.take()
            if last:
                self.gradients.finish()

    def gradient_norm(self, gradients: list[Tensor]) -> float:
        return super().gradient_norm([g.to_local() if isinstance(g, DTensor) else g for g in gradients])
