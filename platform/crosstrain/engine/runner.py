"""The interface of runner plugins, with the defaults of plain torch."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crosstrain.config.bounds import PositiveInt
from crosstrain.config.run_options import RunOptions
from crosstrain.data.loader import MicroBatch
from crosstrain.distributed.group import Group, choose_device, meet, world
from crosstrain.distributed.watchdog import watchdog
from crosstrain.engine.expert_parallel import check_experts
from crosstrain.engine.footprint import Layout, PlanContext, data_parallel
from crosstrain.engine.held_state import HeldState
from crosstrain.engine.matrix_optimizer import MatrixOptimizer
from crosstrain.engine.optimizer import MakeOptimizer, NamedParameters, create_state, global_norm, gradients_of
from crosstrain.engine.precision import Precision
from crosstrain.modeling.base import Model, Sums, add_sums, largest_share
from crosstrain.modeling.forward_mode import PLAIN, ForwardMode
from crosstrain.modeling.meta_init import construct
from crosstrain.utils.errors import ConfigError, TrainingError, first_line
from crosstrain.utils.rng import seed_everything_for
from crosstrain.utils.timers import Timers
from crosstrain.utils.types import Batch


@dataclass
class ContextOptions:
    """Options of runners whose ranks can share sequences."""

    context_parallel: PositiveInt = 1  # ranks that share each sequence: every one computes a part of its tokens


@dataclass
class StepResult:
    """Result of an attempted optimizer step."""

    grad_norm: float  # global norm before clipping, loss scale taken out; not finite where it overflowed
    applied: bool


class Runner(HeldState):
    """Base class of all runners, which Lightning and MMEngine call strategies: it decides where a training step runs.

    A runner owns the four things in which DDP, FSDP, ZeRO and Megatron differ, and nothing else: the micro-batch loop,
    clip-and-step, the evaluation forward, and what each rank holds. The defaults are a complete single-process runner.
    `run.runner: {name: ..., <Options>}` chooses and configures one.

    After `setup`: `device`, `world` (all ranks), `dp` (the ranks that see different samples) and `context` (those that
    share samples, each with a part of every sequence). After `prepare`: `model`, `module` (what is called to compute;
    the model itself unless something wraps it) and `optimizer` (None for evaluation).
    """

    needs_process_group = False  # True: the engine needs torch's process group even for a single process
    takes_quantized = True  # False: a model with parameters in few bits (`Model.weights.quantized`) is refused
    takes_float8 = True  # False: `run.amp.linear: float8`, which exchanges modules within the blocks, is refused
    saves_memory: ClassVar[tuple[str, ...]] = ()  # settings of options, option=value, that a plan tries as well
    cuts_models = False  # True: a rank may compute with a part of the model, which `layouts` describes

    device: torch.device
    world: Group
    dp: Group
    context: Group = Group()
    module: nn.Module
    micro_losses: list[Tensor]  # summed, of the last step's micro batches; empty on a rank that computes none

    def __init__(self, options: Any, run: RunOptions) -> None:
        self.options, self.run = options, run
        self.timers = Timers()
        self.micro_losses = []
        self.used = set[nn.Parameter]()  # reached by the last backward; empty unless `watch_use` was called

    # ---- joining

    @classmethod
    def data_parallel_size(cls, options: Any, world_size: int) -> int:
        """Number of ranks that see different samples; ConfigError where `world_size` does not fit the options."""
        sharing = context_size(options)
        if world_size % sharing:
            raise ConfigError(f"run.runner.context_parallel: {sharing} does not divide the {world_size} ranks evenly")
        return world_size // sharing

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        """Raise ConfigError for settings of the run that exclude each other here; called before a worker exists."""
        if run.compile != "none" and getattr(options, "expert_parallel", 1) > 1:
            raise ConfigError("run.compile: experts wait for other ranks' numbers of tokens; use none")

    @classmethod
    def check_model(cls, options: Any, model: Model) -> None:
        """Raise ConfigError for a model, on the meta device, that cannot be laid out so; before a worker exists."""
        if (ranks := getattr(options, "expert_parallel", 1)) > 1:
            check_experts(model, ranks)

    @classmethod
    def layouts(cls, options: Any, at: PlanContext) -> list[Layout]:
        """Memory and traffic of each kind of rank, for `crosstrain plan`; called before a worker exists."""
        return [data_parallel(at)]

    def setup(self) -> None:
        """Choose the device and join the other ranks; a process group that is there already, as a fake one, is used."""
        local_rank, size = world()
        self.device = choose_device(self.run.device, local_rank)
        if not dist.is_initialized() and (size > 1 or self.needs_process_group):
            cuda = self.device.type == "cuda"
            # The timeout is later than the watchdog's.
            rank, timeout = int(os.environ["RANK"]) if size > 1 else 0, (self.run.collective_timeout or 1740) + 60
            store = meet(rank, size, timeout) if size > 1 else dist.HashStore()
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=size,
                device_id=self.device if cuda else None, timeout=timedelta(seconds=timeout),
            )  # fmt: skip
            watchdog.install(self.run.collective_timeout)
        self.world = self.dp = Group(dist.group.WORLD if dist.is_initialized() else None)
        self.precision = Precision(self.run.amp, self.device.type)
        self.share_sequences(self.replicas())

    def replicas(self) -> list[list[int]]:
        """Ranks that have, or share, one copy of the same parameters, and whose gradients are summed; all of them."""
        return [[*range(self.world.size)]]

    def share_sequences(self, replicas: list[list[int]]) -> None:
        """Make `dp` and `context` of each list of replicas, where neighbours share samples."""
        if (size := context_size(self.options)) > 1:
            rows = [ranks[i : i + size] for ranks in replicas for i in range(0, len(ranks), size)]
            self.dp = _subgroup([ranks[i::size] for ranks in replicas for i in range(size)], "samples")
            self.context = _subgroup(rows, "context")

    def new_group(self) -> Group:
        """A process group of all ranks for small host-side messages, independent of training's."""
        if self.world.process_group is None:
            return Group()
        return Group(cast(dist.ProcessGroup, dist.new_group(backend="gloo")))

    def close(self) -> None:
        """Leave together; a rank that left early would break the others' last collective."""
        if dist.is_initialized():
            self.world.barrier()
            watchdog.remove()
            dist.destroy_process_group()

    # ---- building

    def construct(self, make_model: Callable[[], Model]) -> Model:
        """Build the model where it will live; its weights are filled in after `prepare`."""
        return construct(make_model, self.device)

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        """Shard or wrap the model, then build the optimizer over what is left. No optimizer: evaluation only."""
        self.model = self.module = model
        self.build_optimizer(make_optimizer)

    def build_optimizer(self, make_optimizer: MakeOptimizer | None) -> None:
        """Build the optimizer over the model's parameters as they are now, and allocate its state; for `prepare`."""
        if make_optimizer is not None:
            self.optimizer = self.bound(make_optimizer(self.owned_parameters(), self.full_shape))
            try:
                create_state(self.optimizer)
            except RuntimeError as error:  # an operation that the parameters' kind of tensor does not have
                name, reason = self.run.optimizer.name, first_line(error)
                raise ConfigError(f"run.optimizer: {name} fails under this runner: {reason}") from error

    def bound(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer, told where the parts of whole matrices are if it needs them. Collective."""
        if isinstance(optimizer, MatrixOptimizer):
            optimizer.bind(self.shards, self.copies_group(), self.device)
        return optimizer

    def copies_group(self) -> Group:
        """The ranks that hold copies or parts of this rank's parameters. Collective."""
        return self.world

    def owned_parameters(self) -> NamedParameters:
        """Parameters for the optimizer: the model's, or what stands for this rank's part of them."""
        return self.model.named_parameters()

    # ---- training

    def forward_backward(self, micro_batches: list[MicroBatch], num_targets: int) -> float:
        """Gradients of one optimizer step; returns the step's loss, the same on every rank.

        The loss is the sum over the target tokens of all micro batches and ranks, divided by their number
        `num_targets`. The weight of a micro batch does not depend on the number of ranks, so that what overflows in
        fp16 does not either.
        """
        weight = self.precision.scaler.scale / num_targets
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.micro_losses = []
        for i, micro_batch in enumerate(micro_batches):
            with self.gradient_sync(last=i == len(micro_batches) - 1):
                self.seed_for(micro_batch)
                with self.timers("forward"):
                    loss = self.compute_loss(self.to_device(micro_batch.data))
                self.backward(loss * weight)
            self.micro_losses.append(loss.detach())
            total += self.micro_losses[-1]
        with self.timers("allreduce"):
            return self.dp.all_reduce_sum(total.item())[0] / num_targets

    def count_choices(self, micro_batches: list[MicroBatch]) -> None:
        """Count the routers' choices in a step, without dropout, where a loss has to know them. Collective."""
        for routers in self.model.structure.routers():
            if routers.counts_first:
                with self.evaluating():
                    for micro_batch in micro_batches:
                        self.evaluate(micro_batch.data, ForwardMode(counts_choices=True))
                routers.end_count(self.dp.process_group, self.context.process_group)

    def seed_for(self, micro_batch: MicroBatch) -> None:
        """Seed torch's random numbers (dropout) for a micro batch; ranks that share it draw their own."""
        parts = [self.context.rank] if self.context.size > 1 else []
        seed_everything_for(self.run.seed, micro_batch.first_sample, *parts)

    @property
    def gradient_scale(self) -> float:
        """Factor on the gradients after `forward_backward`: the loss scale over the ranks that engines average over.

        The sum is meant: each rank's gradient is that of its part of the loss, divided by the number of all targets.
        """
        return self.precision.scaler.scale / (self.dp.size * self.context.size)

    def compute_loss(self, batch: Batch, mode: ForwardMode = PLAIN) -> Tensor:
        """Summed loss of a batch on this device, or the result that `mode` asks for, under autocast."""
        with self.precision.autocast():
            return self.module(**batch, **mode.arguments())

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a weighted loss."""
        self.used.clear()
        with self.timers("backward"):
            loss.backward()

    def watch_use(self) -> None:
        """Note the trained parameters that each backward reaches, for `check_all_used`; for `prepare`."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.used.add)

    def check_all_used(self, problem: str) -> None:
        """Raise TrainingError, with the `problem` that it is, where the last backward left out a trained parameter."""
        parameters = self.model.weights.parameters().items()
        if unused := [name for name, p in parameters if p.requires_grad and p not in self.used]:
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            raise TrainingError(f"{', '.join(unused[:5])}{more} took no part in the loss of a micro batch, {problem}")

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Context of a micro batch: where an engine can wait, gradients are exchanged only after the last."""
        return nullcontext()

    def optimizer_step(self, apply: bool = True) -> StepResult:
        """Unscale, clip by global norm, step, zero, adapt the loss scale. `apply=False` throws the gradients away."""
        assert self.optimizer is not None
        gradients = gradients_of(self.optimizer)
        scale = self.gradient_scale
        norm = self.gradient_norm(gradients) / scale
        applied = apply and norm < float("inf")  # false for NaN too
        if applied:
            limit = self.run.grad_norm_clip
            clip = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
            if clip / scale != 1.0:
                torch._foreach_mul_(gradients, clip / scale)
            self.update()
        self.model.zero_grad(set_to_none=True)  # not the optimizer's alone: it may own a share of the parameters
        self.precision.update_scale(apply, applied)
        return StepResult(norm, applied)

    def update(self) -> None:
        """Change the parameters by the gradients as they now stand."""
        assert self.optimizer is not None
        self.optimizer.step()

    def gradient_norm(self, gradients: list[Tensor]) -> float:
        """Global 2-norm of all gradients, times `gradient_scale`; the same on every rank."""
        return global_norm(gradients)

    def set_learning_rate(self, rate: float) -> None:
        """The rate of the next step; a parameter group may scale it by its `lr_scale`."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)

    def means(self, sums: Sums) -> dict[str, float]:
        """Means over all ranks of what each rank's model recorded (`Model.take_recorded`), by name. Collective."""
        totals: Sums = {}
        for held in self.world.all_gather(sums):
            add_sums(totals, held)
        return {
            name: largest_share(total) if isinstance(total, Tensor) else total / count
            for name, (total, count) in totals.items() if count
        }  # fmt: skip

    # ---- evaluation

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode: no dropout, no gradients."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()

    def evaluate(self, batch: Batch, mode: ForwardMode = PLAIN) -> Tensor:
        """The model's output for a batch, valid on every rank; generation calls this too. Use in `evaluating`."""
        with self.precision.autocast():
            return self.model(**self.to_device(batch), **mode.arguments())

    def to_device(self, batch: Batch) -> Batch:
        """The batch with its tensors on this rank's device."""
        return {
            key: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
            for key, value in batch.items()
        }


def context_size(options: Any) -> int:
    """Ranks that share each sequence under a runner's options."""
    return getattr(options, "context_parallel", 1)


def _subgroup(rows: list[list[int]], name: str) -> Group:
    """This rank's group of several that are made together."""
    if len(rows[0]) == 1:
        return Group()
    return Group(cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(rows, group_desc=name)[0]))
