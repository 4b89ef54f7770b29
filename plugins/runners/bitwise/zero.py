"""Bitwise reproducible ZeRO: gradient sums, norm and clipping do not depend on the number of ranks."""

from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from crosstrain import ConfigError, Layout, MakeOptimizer, Model, PlanContext, RunOptions
from crosstrain.engine.optimizer import unscale_and_clip_

from ..deepspeed.runner import DeepSpeedRunner
from .backend import BACKENDS
from .base import Rounded

_SCATTER = "deepspeed.runtime.zero.stage3.reduce_scatter_coalesced"


class BitwiseZeRO(Rounded, DeepSpeedRunner):
    """DeepSpeed's ZeRO on process groups whose sums are fixed trees. Stage 1 reduces gradients as stage 2 does."""

    capabilities: ClassVar = replace(DeepSpeedRunner.capabilities, backends=BACKENDS, draws_parts=True)
    _norm = 0.0

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        super().check(options, run)
        if options.stage == 0:
            raise ConfigError("run.bitwise: DeepSpeed's stage 0 is not supported; use ddp")
        if options.offloads_optimizer or options.nvme_paths or options.param_dtype != "amp":
            raise ConfigError("run.bitwise: DeepSpeed must not set offload_optimizer, offload_param or param_dtype")

    @classmethod
    def layouts(cls, options: Any, at: PlanContext) -> list[Layout]:
        return super().layouts(replace(options, stage=max(options.stage, 2)), at)

    def _config(self, micro_batch: int, accumulation: int) -> dict[str, Any]:
        config = super()._config(micro_batch, accumulation)
        section = config["zero_optimization"] | {"stage": max(config["zero_optimization"]["stage"], 2)}
        if section["stage"] == 3:  # DeepSpeed's own linear layer adds biases without rounding them to half precision
            section["memory_efficient_linear"] = False
        return config | {"zero_optimization": section}

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        super().prepare(model, make_optimizer)
        if self.optimizer is None:
            return
        zero = self.engine.optimizer
        zero.sequence_parallel_size = self.world.size  # DeepSpeed divides sums by ranks / this size, which is 1
        if self.options.stage == 3:
            zero._get_norm_groups = lambda: [self._measured()]
            zero.unscale_and_clip_grads = lambda group, _: self._clip([zero.fp32_partitioned_groups_flat[group].grad])
        else:
            zero.scaled_global_norm = lambda *_, **__: self._measured()
            zero.unscale_and_clip_grads = lambda gradients, _: self._clip(gradients)

    def backward(self, loss: Tensor) -> None:
        with patch(_SCATTER, _reduce_scatter):
            super().backward(loss)

    def _measured(self) -> Tensor:
        averaged = self.engine.optimizer.averaged_gradients
        self._norm = self.gradient_norm([g for gradients in averaged.values() for g in gradients])
        return torch.tensor(self._norm, dtype=torch.float64)

    def _clip(self, gradients: list[Tensor]) -> None:
        """Clip as other runners do; DeepSpeed rounds the factor differently."""
        scale = self.gradient_scale
        unscale_and_clip_(gradients, self._norm / scale, scale, self.run.grad_norm_clip)


def _reduce_scatter(tensors: list[Tensor], group: Any = None) -> list[Tensor]:
    """Reduce-scatter several tensors as DeepSpeed does, but without dividing the sums.

    Each tensor is padded at the end, and split into one equal part per rank.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    widths = [-(-tensor.numel() // size) for tensor in tensors]
    rows = [
        pad(t.flatten(), (0, -t.numel() % size)).view(size, width) for t, width in zip(tensors, widths, strict=True)
    ]
    sent = torch.cat(rows, 1)
    out = sent.new_empty(sent.shape[1])
    dist.reduce_scatter_tensor(out, sent.flatten(), group=group)
    lengths = [max(0, min(width, t.numel() - rank * width)) for t, width in zip(tensors, widths, strict=True)]
    return [part[:length] for part, length in zip(out.split(widths), lengths, strict=True)]
