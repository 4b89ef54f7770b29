"""Pipelines to the same bits: each stage sums its gradients of a step's micro batches in the tree of bitwise DDP."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from crosstrain import ConfigError, Group, MakeOptimizer, MicroBatch, Model, RunOptions

from ..megatron.data_parallel import DDPStrategy, Share
from ..megatron.runner import MegatronRunner
from .base import Bitwise, unfused
from .gradients import WholeGradients
from .norm import exact_norm


class TreeStrategy(DDPStrategy):
    """Data parallelism whose gradients are summed in a fixed tree after the last micro batch of a step."""

    def __init__(self, group: Group) -> None:
        super().__init__(group, bucket_mb=1)

    def watch(self, shares: list[Share]) -> None:
        self.shares = [share for share in shares if share.parameter.requires_grad]
        self.gradients = WholeGradients([share.parameter for share in self.shares], self.group)

    def start(self, backwards: int) -> None:
        self.gradients.begin_step(backwards)

    def reduce_grads(self) -> None:
        self.gradients.finish()
        self._hand_over()


class BitwiseMegatron(Bitwise, MegatronRunner):
    """Pipeline and data parallelism. Stages compute as one process does, with the same random numbers."""

    capabilities: ClassVar = replace(MegatronRunner.capabilities, consecutive_micro_batches=True)
    data_parallel: TreeStrategy

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        super().check(options, run)
        for name in ("tensor_parallel", "expert_parallel", "pipeline_chunks"):
            if getattr(options, name) > 1:
                raise ConfigError(f"run.bitwise: {name} is not supported; use {name}=1")
        if options.offload != "none" or options.data_parallel_style not in (None, "allreduce"):
            raise ConfigError("run.bitwise: megatron must not set offload, or data_parallel_style to zero1 or fsdp")

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        self._sent: list[Any] = []  # handles of sends that may still be in progress
        super().prepare(model, unfused(make_optimizer))

    def _choose_strategies(self, model: Model) -> torch.device:
        self.data_parallel = TreeStrategy(self.copies)
        self.strategies = [self.data_parallel]
        return self.device

    def forward_backward(self, micro_batches: list[MicroBatch], num_targets: int) -> float:
        loss = super().forward_backward(micro_batches, num_targets)
        for work in self._sent:
            work.wait()
        self._sent.clear()
        return loss

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        yield
        for share in self.tied:
            self._add_tied(share)
        self.data_parallel.gradients.take()

    def _add_tied(self, share: Share) -> None:
        """Add the last stage's gradient of a tied parameter to the first stage's, for one micro batch.

        In one process, this sum is the leaf of the tree. The last stage keeps zeros, and gets the total later.
        """
        gradient = share.parameter.grad
        assert gradient is not None
        if self.stages.rank > 0:  # the first stage receives this gradient later, in its backward of the micro batch
            self._sent.append(dist.isend(gradient.contiguous(), group=self.tied_group, group_dst=0))
            share.parameter.grad = None
        else:
            received = torch.empty_like(gradient)
            dist.recv(received, group=self.tied_group, group_src=1)
            gradient.add_(received)

    def gradient_norm(self, gradients: list[Tensor]) -> float:
        """Return the norm over the stages; data-parallel copies have equal gradients."""
        counted = [s.owned.grad for s in self.shares.values() if s.norm_weight and s.owned.grad is not None]
        return exact_norm(counted, self.stages)
