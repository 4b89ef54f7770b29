"""Megatron's parallelism to the same bits: each rank sums its gradients of a step in the tree of bitwise DDP."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from crosstrain import ConfigError, Group, MakeOptimizer, MicroBatch, Model, RunOptions

from ..megatron.data_parallel import DDPStrategy, Share
from ..megatron.plan import Resolved
from ..megatron.rng_tracker import RngTracker
from ..megatron.runner import MegatronRunner
from ..megatron.tensor_parallel import TensorParallel
from .backend import BACKEND
from .base import Bitwise, unfused
from .gradients import WholeGradients
from .norm import exact_norm
from .units import Units, plan_of_units


class TreeStrategy(DDPStrategy):
    """Data parallelism whose gradients are summed in a fixed tree after the last micro batch of a step."""

    def __init__(self, group: Group) -> None:
        super().__init__(group, bucket_mb=1)

    def watch(self, shares: list[Share]) -> None:
        self.shares = [share for share in shares if share.parameter.requires_grad]
        self.gradients = WholeGradients([share.owned for share in self.shares], self.group)

    def start(self, backwards: int) -> None:
        self.gradients.begin_step(backwards)

    def take(self) -> None:
        """Add the gradients of a micro batch."""
        self._hand_over()
        self.gradients.take()

    def reduce_grads(self) -> None:
        self.gradients.finish()


class _InUnits(TensorParallel):
    """Tensor parallelism of a fixed width."""

    def __init__(self, width: int, group: dist.ProcessGroup, rng: RngTracker) -> None:
        super().__init__(group, False, rng)
        self.units = Units(width // self.size, group)

    def compute(self, model: Model, plan: Resolved) -> None:
        self.units.compute(model, plan)


class BitwiseMegatron(Bitwise, MegatronRunner):
    """Tensor, pipeline and data parallelism. Stages compute as one process does, with the same random numbers."""

    capabilities: ClassVar = replace(MegatronRunner.capabilities, consecutive_micro_batches=True, backend=BACKEND)
    data_parallel: TreeStrategy

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        super().check(options, run)
        unsupported = {
            "expert_parallel": options.expert_parallel > 1,
            "pipeline_chunks": options.pipeline_chunks > 1,
            "sequence_parallel": options.sequence_parallel,
        }
        for name, used in unsupported.items():
            if used:
                raise ConfigError(f"run.bitwise: {name} is not supported; leave it out")
        width, degree = run.bitwise.width or 1, options.tensor_parallel
        units, rest = divmod(width, degree)
        if degree > 1 and (rest or units & (units - 1)):
            allowed = [str(d) for d in range(1, width + 1) if width % d == 0 and (width // d).bit_count() == 1]
            raise ConfigError(
                f"run.bitwise.width: {width} allows a tensor_parallel of {', '.join(allowed)}, but it is {degree}; set "
                f"width, in every run that is compared, to a power of two times {degree}"
            )
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
        self.data_parallel.take()

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

    @classmethod
    def over(cls, options: Any) -> dict[str, str]:
        return options.plan

    def tensor_parallel(self, group: dist.ProcessGroup) -> TensorParallel:
        return _InUnits(self.run.bitwise.width or 1, group, self.rng)

    def plan(self, model: Model) -> Resolved:
        return plan_of_units(model, self.options.plan)

    def gradient_norm(self, gradients: list[Tensor]) -> float:
        """Return the norm over all ranks; gradients that several ranks hold count once."""
        counted = []
        for share in self.shares.values():
            counts = self.copies.rank == 0 and (bool(share.cuts) or self.tensor is None or self.tensor.rank == 0)
            if counts and share.norm_weight and share.owned.grad is not None:
                counted.append(share.owned.grad)
        return exact_norm(counted, self.world)
