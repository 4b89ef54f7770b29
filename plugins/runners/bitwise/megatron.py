"""Megatron's parallelism to the same bits: each rank sums its gradients of a step in the tree of bitwise DDP."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crosstrain import ConfigError, Group, MakeOptimizer, MicroBatch, Model, RunOptions

from ..megatron.data_parallel import DDPStrategy, Share
from ..megatron.expert_parallel import ExpertParallel
from ..megatron.pipeline import tied_names
from ..megatron.plan import Resolved, ShardSpec, ends_of
from ..megatron.runner import MegatronRunner
from ..megatron.tensor_parallel import TensorParallel
from .backend import BACKENDS
from .base import Bitwise, unfused
from .experts import ExpertSources
from .gradients import WholeGradients
from .norm import exact_norm
from .slices import SlicedHead
from .units import Units, check_sequence, plan_of_units


class TreeStrategy(DDPStrategy):
    """Data parallelism whose gradients are summed in a fixed tree after the last micro batch of a step.

    context: the ranks that have the other parts of each sequence. sources: for experts, the gradients from each rank
    that sends tokens.
    """

    def __init__(self, group: Group, context: Group, sources: list[dict[nn.Parameter, Tensor]] | None = None) -> None:
        super().__init__(group, bucket_mb=1)
        self.context, self.sources = context, sources

    def watch(self, shares: list[Share]) -> None:
        self.shares = [share for share in shares if share.parameter.requires_grad]
        owned = [share.owned for share in self.shares]
        self.gradients = WholeGradients(
            owned, self.group, self.context, 1 if self.sources is None else len(self.sources)
        )

    def start(self, backwards: int) -> None:
        self.gradients.begin_step(backwards)

    def take(self) -> None:
        """Add the gradients of a micro batch of each source."""
        if self.sources is None:
            self._hand_over()
            self.gradients.take()
            return
        for number, gradients in enumerate(self.sources):
            for share in self.shares:
                share.owned.grad = gradients.pop(share.parameter, None)
            self.gradients.take(number)

    def reduce_grads(self) -> None:
        self.gradients.finish()


class _InUnits(TensorParallel):
    """Tensor parallelism of a fixed width."""

    def __init__(self, width: int, context: Group, *parallel: Any) -> None:
        super().__init__(*parallel)
        self.units = Units(width // self.size, context, self)
        self.has_dropout = False  # each rank draws the random numbers of one process

    def compute(self, model: Model, plan: Resolved) -> None:
        self.units.compute(model, plan)


class BitwiseMegatron(Bitwise, MegatronRunner):
    """Tensor, pipeline and data parallelism. Stages compute as one process does, with the same random numbers."""

    capabilities: ClassVar = replace(
        MegatronRunner.capabilities, consecutive_micro_batches=True, backends=BACKENDS, draws_parts=True
    )
    data_parallel: TreeStrategy
    strategies: list[TreeStrategy]  # type: ignore[assignment]

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        super().check(options, run)
        if options.sequence_parallel and run.bitwise.slices is not None:
            raise ConfigError("run.bitwise.slices: sequence_parallel splits sequences, too; remove one of the two")
        if options.pipeline_chunks > 1:
            raise ConfigError("run.bitwise: pipeline_chunks is not supported; leave it out")
        width, degree = run.bitwise.width or 1, options.tensor_parallel
        units, rest = divmod(width, degree)
        if degree > 1 and (rest or units & (units - 1)):
            allowed = [str(d) for d in range(1, width + 1) if width % d == 0 and (width // d).bit_count() == 1]
            raise ConfigError(
                f"run.bitwise.width: {width} allows a tensor_parallel of {', '.join(allowed)}, but it is {degree}; set "
                f"width, in every run that is compared, to a power of two times {degree}"
            )
        if degree > 1 and units % options.context_parallel:
            raise ConfigError(
                f"run.bitwise.width: {width} is not a multiple of tensor_parallel x context_parallel, {degree} x "
                f"{options.context_parallel}"
            )
        if options.offload != "none" or options.data_parallel_style not in (None, "allreduce"):
            raise ConfigError("run.bitwise: megatron must not set offload, or data_parallel_style to zero1 or fsdp")

    @classmethod
    def check_model(cls, options: Any, run: RunOptions, model: Model) -> None:
        super().check_model(options, run, model)
        if options.sequence_parallel:
            check_sequence(model, options.plan)
        tied = set[str]()
        if run.bitwise.slices is not None and options.pipeline_parallel > 1:
            tied = tied_names(model, ends_of(model, "pipeline_parallel"))
        if any(model.get_parameter(name).requires_grad for name in tied):
            raise ConfigError("run.bitwise.slices: stages would add the gradients of a tied embedding in another order")

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        self._sent: list[Any] = []  # handles of sends that may still be in progress
        super().prepare(model, unfused(make_optimizer))

    def _choose_strategies(self, model: Model) -> torch.device:
        self.data_parallel = TreeStrategy(self.dp, self.context)
        self.strategies = [self.data_parallel]
        if self.options.expert_parallel > 1:
            self.strategies.append(
                TreeStrategy(Group(self.expert_mesh["expert_data"].get_group()), self.context, self.experts.taps)
            )
        return self.device

    def expert_parallel(self, group: dist.ProcessGroup) -> ExpertParallel:
        self.experts = ExpertSources(group)
        return self.experts

    def _cut(self, model: Model) -> Any:
        cut = super()._cut(model)
        if self.slices is not None:
            self.head = SlicedHead(self.slices, self.head)
        return cut

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
        for strategy in self.strategies:
            strategy.take()

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

    def _on_split_sequences(self, model: Model, cuts: dict[str, ShardSpec]) -> set[str]:
        return set()  # replicated parameters compute with whole sequences

    @classmethod
    def over(cls, options: Any) -> dict[str, str]:
        return options.plan

    def tensor_parallel(self, group: dist.ProcessGroup) -> TensorParallel:
        return _InUnits(self.run.bitwise.width or 1, self.context, group, self.options.sequence_parallel, self.rng)

    def plan(self, model: Model) -> Resolved:
        return plan_of_units(model, self.options.plan)

    def gradient_norm(self, gradients: list[Tensor]) -> float:
        """Return the norm over all ranks; gradients that several ranks hold count once."""
        counted = []
        for share in self.shares.values():
            # A weight of 1: no other tensor-parallel rank has the same part.
            counts = share.norm_weight == 1.0 or (share.norm_weight and self.mesh.get_local_rank("tensor") == 0)
            if counts and share.strategy.group.rank == self.context.rank == 0 and share.owned.grad is not None:
                counted.append(share.owned.grad)
        return exact_norm(counted, self.world)
