"""The interface of runner plugins. The base class is a complete runner in plain torch."""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from crosstrain.config.bounds import PositiveInt
from crosstrain.config.registry import registry
from crosstrain.config.run_options import RunOptions
from crosstrain.config.schema import Component
from crosstrain.distributed.group import Group, choose_device, world
from crosstrain.distributed.wait_for_ranks import wait_for_ranks
from crosstrain.distributed.watchdog import watchdog
from crosstrain.engine.footprint import Layout, PlanContext, data_parallel
from crosstrain.engine.held_state import HeldState
from crosstrain.engine.optimizer import MakeOptimizer, global_norm, gradients_of, unscale_and_clip_
from crosstrain.engine.precision import Precision, choose_products
from crosstrain.modeling.base import Model, Sums, add_sums, largest_share
from crosstrain.modeling.forward_mode import PLAIN, ForwardMode
from crosstrain.modeling.meta_init import materialize, parameters_on_meta
from crosstrain.modeling.objective import Objective
from crosstrain.utils.errors import ConfigError
from crosstrain.utils.rng import derive_seed
from crosstrain.utils.timers import Timers
from crosstrain.utils.types import Batch, MicroBatch


@dataclass
class ContextOptions:
    """Options of runners with context parallelism."""

    context_parallel: PositiveInt = 1  # number of ranks over which each sequence is split

    def replicas(self, world_size: int) -> list[list[int]]:
        """Groups of ranks that replicate or shard the same parameters and sum gradients; default: one group for all."""
        return [[*range(world_size)]]


def context_size(options: Any) -> int:
    """Number of ranks over which each sequence is split, according to a runner's options."""
    return options.context_parallel if isinstance(options, ContextOptions) else 1


@dataclass(frozen=True)
class Capabilities:
    """Features of a runner class."""

    exact: bool = True  # False: results differ from plain torch, because teams of ranks train apart for some steps
    forms_teams: bool = False  # True: the runner also works with a `team` that is only a part of the ranks
    extends: str | None = None  # option with a runner that forms teams: the class is combined with this runner's class
    needs_process_group: bool = False  # True: the engine needs torch's process group even for a single process
    takes_quantized: bool = True  # False: models with quantized parameters (`Model.weights.quantized`) are rejected
    rejoins: bool = False  # True: a process may leave its groups, join others, and create another runner
    saves_memory: tuple[str, ...] = ()  # memory-saving settings, option=value, that `crosstrain plan` also tries
    cuts_models: bool = False  # True: a rank may compute with only a part of the model; `layouts` describes the part
    bitwise: str | None = None  # "module:class" of the subclass for `run.bitwise`; None: `run.bitwise` is rejected
    # type of a device -> backend of torch's process groups for its tensors
    backends: Mapping[str, str] = field(default_factory={"cpu": "gloo", "cuda": "nccl"}.copy)
    draws_parts: bool = False  # True: a rank with a part of a sequence draws the random numbers of this part by itself
    consecutive_micro_batches: bool = False  # True: a rank takes consecutive micro batches of a step, not every n-th


@dataclass
class StepResult:
    """Result of an attempted optimizer step."""

    grad_norm: float  # global gradient norm before clipping, without the loss scale; not finite after an overflow
    applied: bool


class Runner:
    """Base class of all runners (called strategies in Lightning and MMEngine). A runner executes the training steps.

    A runner implements the four parts that differ between DDP, FSDP, ZeRO and Megatron: the micro-batch loop, clipping
    and the optimizer step, the evaluation forward, and the layout of each rank's tensors. The default methods are a
    complete single-process runner. `run.runner: {name: ..., <Options>}` chooses and configures a runner.

    `setup` sets the attributes `device`, `world` (all ranks), `team` (the ranks that compute each step together: all
    ranks, unless the runner is not `exact`), `team_number`, `dp` (the ranks with different samples) and `context` (the
    ranks that share samples; each has a part of every sequence). `prepare` sets `model`, `module` (the callable
    for the forward: the model or its wrapper) and `optimizer` (None for evaluation). The forward takes
    `objective.inputs(batch)`. `state` holds JSON values that are saved in checkpoints and restored on resume.
    """

    capabilities: ClassVar = Capabilities()

    device: torch.device
    world: Group
    team: Group
    team_number: int
    dp: Group
    model: Model
    module: nn.Module

    def __init__(self, options: Any, run: RunOptions) -> None:
        self.options, self.run = options, run
        self.timers, self.context = Timers(), Group()
        self.optimizer: torch.optim.Optimizer | None = None
        # summed loss of each micro batch in the last step; empty on a rank without losses
        self.micro_losses: list[Tensor] = []
        self.updates = 0  # optimizer steps that this process has begun
        self.state: dict[str, Any] = {}
        self.objective = Objective(None)  # computes the loss of a batch

    @cached_property
    def held(self) -> HeldState:
        """This rank's shards of parameters, optimizer state and gradients."""
        return HeldState(self)

    # ---- joining

    @classmethod
    def data_parallel_size(cls, options: Any, world_size: int) -> int:
        """Number of ranks with different samples. Raises ConfigError if `world_size` does not fit the options."""
        sharing = context_size(options)
        if world_size % sharing:
            raise ConfigError(f"run.runner.context_parallel: {sharing} does not divide the {world_size} ranks evenly")
        return world_size // sharing

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        """Raise ConfigError for settings that do not work with this runner. Called before workers start."""

    @classmethod
    def check_model(cls, options: Any, run: RunOptions, model: Model) -> None:
        """Raise ConfigError if the runner cannot shard `model` (on the meta device). Called before workers start."""

    @classmethod
    def layouts(cls, options: Any, at: PlanContext) -> list[Layout]:
        """Memory and communication of each kind of rank, for `crosstrain plan`. Called before workers start."""
        return [data_parallel(at)]

    def setup(self) -> None:
        """Choose the device and join the other ranks. An existing process group, such as a fake group, is reused."""
        local_rank, size = world()
        if self.run.threads is not None:
            torch.set_num_threads(self.run.threads)
        self.device = choose_device(self.run.device, local_rank)
        if self.device.type == "cpu":
            choose_products()
        if not dist.is_initialized() and (size > 1 or self.capabilities.needs_process_group):
            cuda = self.device.type == "cuda"
            backends = [f"{kind}:{name}" for kind, name in self.capabilities.backends.items() if cuda or kind == "cpu"]
            # The timeout is one minute longer than the watchdog's limit, so that the watchdog reports first.
            rank, timeout = int(os.environ["RANK"]) if size > 1 else 0, (self.run.collective_timeout or 1740) + 60
            store = wait_for_ranks(rank, size, timeout) if size > 1 else dist.HashStore()
            dist.init_process_group(
                ",".join(backends),
                store=store,
                rank=rank,
                world_size=size,
                device_id=self.device if cuda else None,
                timeout=timedelta(seconds=timeout),
            )
            watchdog.install(self.run.collective_timeout, tells_lost=self.run.on_lost_rank == "restart")
        self.world = self.dp = Group(dist.group.WORLD if dist.is_initialized() else None)
        self.team, self.team_number = self.world, 0
        self.precision = Precision(self.run.amp, self.device.type)
        if (size := context_size(self.options)) > 1:
            replicas = self.options.replicas(self.world.size)
            self.dp = _subgroup([ranks[i::size] for ranks in replicas for i in range(size)], "samples")
            rows = [ranks[i : i + size] for ranks in replicas for i in range(0, len(ranks), size)]
            self.context = _subgroup(rows, "context")

    def close(self) -> None:
        """Wait for all ranks, then leave the process group. An early exit would break other ranks' last collective."""
        if dist.is_initialized():
            self.world.barrier()
            watchdog.remove()
            dist.destroy_process_group()

    # ---- building

    def construct(self, make_model: Callable[[], Model]) -> Model:
        """Build the model in fp32 on its device, with all weights zero; weights are loaded after `prepare`."""
        with parameters_on_meta():
            model = make_model()
        return materialize(model, self.device)

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        """Shard or wrap the model, then build the optimizer, unless `make_optimizer` is None (evaluation)."""
        self.model = self.module = model
        self.held.build_optimizer(make_optimizer)

    def loaded(self) -> None:
        """Refresh everything that is derived from the tensors of `held`. Called after these tensors are loaded."""

    # ---- training

    def forward_backward(self, micro_batches: list[MicroBatch], num_targets: int) -> float:
        """Compute the gradients of one optimizer step, and return the step's loss, which is the same on every rank.

        The loss is summed over the target tokens of all micro batches and ranks, and divided by the number
        of these tokens, `num_targets`. Neither a micro batch's weight in the loss nor an fp16 overflow depends on the
        number of ranks. In a step that a team takes alone (see `together`), the team stands for all ranks.
        """
        weight = self.precision.scaler.scale / num_targets
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.micro_losses = []
        for i, micro_batch in enumerate(micro_batches):
            with self.gradient_sync(last=i == len(micro_batches) - 1):
                seed_dropout(self, micro_batch)
                with self.timers("forward"):
                    loss = self.compute_loss(to_device(micro_batch.data, self.device))
                self.backward(loss * weight)
            self.micro_losses.append(loss.detach())
            total += self.micro_losses[-1]
        ranks = self.dp if self.together is self.world else self.together
        with self.timers("allreduce"):
            return ranks.all_reduce_sum(total.item(), tag="loss")[0] * (self.dp.size / ranks.size) / num_targets

    @property
    def gradient_scale(self) -> float:
        """Factor that the gradients contain after `forward_backward`: the loss scale, divided by the number of ranks.

        Engines average gradients over ranks. The true gradient is the sum over ranks, because each rank's loss is
        already divided by the total number of targets.
        """
        return self.precision.scaler.scale / (self.dp.size * self.context.size)

    def compute_loss(self, batch: Batch, mode: ForwardMode = PLAIN) -> Tensor:
        """Summed loss of a batch on this device, or the result requested by `mode`, under autocast."""
        with self.precision.autocast():
            return self.module(**self.objective.inputs(batch, mode))

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a weighted loss."""
        with self.timers("backward"):
            loss.backward()

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Context manager for a micro batch; only the `last` micro batch of a step has to exchange gradients."""
        return nullcontext()

    def optimizer_step(self, apply: bool = True) -> StepResult:
        """Unscale, clip by global norm, step, zero the gradients, and update the loss scale.

        With `apply=False`, the gradients are discarded without a step.
        """
        assert self.optimizer is not None
        gradients = gradients_of(self.optimizer)
        scale = self.gradient_scale
        norm = self.gradient_norm(gradients) / scale
        applied = apply and norm < float("inf")  # also False for NaN
        if applied:
            unscale_and_clip_(gradients, norm, scale, self.run.grad_norm_clip)
            self.updates += 1
            self.update()
        self.model.zero_grad(set_to_none=True)  # the optimizer may hold only a part of the parameters
        self.precision.update_scale(apply, applied)
        return StepResult(norm, applied)

    def update(self) -> None:
        """Update the parameters with the current gradients."""
        assert self.optimizer is not None
        self.optimizer.step()

    def gradient_norm(self, gradients: list[Tensor]) -> float:
        """Global 2-norm of all gradients, times `gradient_scale`; the value is the same on every rank."""
        return global_norm(gradients)

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next step. A parameter group may scale the rate by its `lr_scale`."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)

    # ---- steps that teams take alone

    @property
    def together(self) -> Group:
        """The ranks that take the next step together: `world`, or `team` in a step without other collectives.

        In such a step, each team has its own loss, norm and update, so parameters and optimizer state differ between
        teams. Only runners that are not `exact` return `team`. All ranks return the same kind of group.
        """
        return self.world

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Context manager in which tensors of the kinds in `held.equal` are the same in all teams. It may be nested.

        Checkpoints are saved and weights are validated in it. Training continues as if it had not been entered.
        """
        yield

    # ---- evaluation

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager for evaluation mode: no dropout, no gradients. It may be nested."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(was_training)

    def evaluate(self, batch: Batch, mode: ForwardMode = PLAIN) -> Tensor:
        """The model's output for a batch, valid on every rank. Validation and generation call this in `evaluating`."""
        with self.precision.autocast():
            return self.model(**self.objective.inputs(to_device(batch, self.device), mode))


def leave_groups() -> None:
    """Leave all process groups without waiting for other ranks, of which some are lost."""
    watchdog.remove()
    if dist.is_initialized():
        dist.destroy_process_group()
    # gloo closes a group's connections, at which other ranks may wait, when nothing refers to the group. The caches of
    # DTensor keep device meshes, so the meshes must drop their groups.
    for mesh in [value for value in gc.get_objects() if type(value) is DeviceMesh]:
        mesh._pg_registry.clear()
    gc.collect()


def runner_class(run: RunOptions) -> type[Runner]:
    """Return the class of the configured runner, or of its variant `Capabilities.bitwise` if `run.bitwise` is set.

    Raises ConfigError if the runner has no such variant.
    """
    chosen = _combined(run.runner)
    if not run.bitwise.enabled:
        return chosen
    module, _, name = (chosen.capabilities.bitwise or "").partition(":")
    variant = getattr(import_module(module), name) if module else None
    if variant is None or not issubclass(variant, chosen):  # a subclass inherits the capabilities of its base
        raise ConfigError(
            f"run.bitwise: {run.runner.name} has no variant of its own (`Capabilities.bitwise`), so its results depend "
            f"on the number of ranks; use a different runner"
        )
    return variant


def _combined(chosen: Component) -> type[Runner]:
    """Return the class of a runner, combined with the class of the runner that it extends, if any."""
    outer: type[Runner] = registry.get("runner", chosen.name)
    if (option := outer.capabilities.extends) is None:
        return outer
    extended = getattr(chosen.options, option)
    inner: type[Runner] = registry.get("runner", extended.name)
    if not inner.capabilities.forms_teams:
        raise ConfigError(
            f"run.runner.{option}: {extended.name} cannot train with a part of the ranks; use ddp or fsdp"
        )
    own = outer.capabilities
    capabilities = replace(inner.capabilities, exact=own.exact, rejoins=own.rejoins, extends=option, bitwise=None)
    return type(outer.__name__, (outer, inner), {"capabilities": capabilities})


def seed_dropout(runner: Runner, micro_batch: MicroBatch) -> None:
    """Seed torch's random number generators for a micro batch.

    Context-parallel ranks use different seeds, unless `Capabilities.draws_parts` is set.
    """
    parts = [] if runner.context.size == 1 or runner.capabilities.draws_parts else [runner.context.rank]
    torch.manual_seed(derive_seed(runner.run.seed, "micro batch", micro_batch.first_sample, *parts))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the tensors of a batch to a device."""
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value for key, value in batch.items()
    }


def recorded_means(sums: Sums, group: Group) -> dict[str, float]:
    """Return name -> mean of the values that all ranks' models recorded (`Model.take_recorded`). Collective."""
    totals: Sums = {}
    for held in group.all_gather(sums):
        add_sums(totals, held)
    return {
        name: largest_share(total) if isinstance(total, Tensor) else total / count
        for name, (total, count) in totals.items()
        if count
    }


def _subgroup(rows: list[list[int]], name: str) -> Group:
    """Create one process group per row of ranks, and return the group of this rank."""
    if len(rows[0]) == 1:
        return Group()
    return Group(cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(rows, group_desc=name)[0]))
