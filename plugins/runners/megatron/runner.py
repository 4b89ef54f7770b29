"""The megatron runner."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from crosstrain import (
    PLAIN,
    Batch,
    Capabilities,
    ConfigError,
    ForwardMode,
    Group,
    Head,
    HeldState,
    Layout,
    MakeOptimizer,
    MicroBatch,
    Model,
    NamedParameters,
    Piece,
    PlanContext,
    Runner,
    RunOptions,
    StepResult,
    global_norm,
    materialize,
    parameters_on_meta,
    registry,
    seed_dropout,
    to_device,
    without_padding,
)

from ..sharding import check_elementwise
from .data_parallel import (
    DDPStrategy,
    FSDPStrategy,
    Share,
    ZeRO1Strategy,
    shard_parameters,
    sum_gradients,
)
from .expert_parallel import ExpertParallel, check_experts
from .footprint import layouts
from .options import Options
from .pipeline import Pipeline, Stage, replace_modules, spread, stubs, tied_names, width_of
from .plan import Resolved, ShardSpec, ends_of, resolve, shard_specs
from .rng_tracker import RngTracker
from .tensor_parallel import ParallelHead, TensorParallel, local, modules_on_parts, shard_model


@dataclass
class _Cut:
    """The sharding of a model's parameters, by name."""

    shapes: dict[str, torch.Size]  # shapes of all parameters before sharding
    summed: set[str]  # replicated parameters; their gradients are summed over the tensor-parallel ranks
    experts: set[str] = field(default_factory=set)  # stacked expert parameters; this rank holds some of the experts
    specs: dict[str, ShardSpec] = field(default_factory=dict)  # parameters sharded by tensor parallelism


@registry.register_runner("megatron")
class MegatronRunner(Runner):
    """Megatron's tensor, sequence, pipeline and expert parallelism, and data parallelism, for unmodified models.

    Ranks form a mesh [pipeline, data, tensor]. Tensor parallelism communicates the most, so its ranks are consecutive.
    Ranks along `data` replicate or shard the same parameters; with context parallelism, adjacent ranks along `data`
    split each sequence. With expert parallelism, `data` consists of two dimensions [expert_data, expert]: ranks along
    `expert` hold different experts; ranks along `expert_data` hold the same experts and sum their gradients.
    """

    Options = Options

    capabilities: ClassVar = Capabilities(
        needs_process_group=True,
        takes_quantized=False,
        cuts_models=True,
        bitwise="crosstrain_plugins.builtin.runners.bitwise.megatron:BitwiseMegatron",
    )
    pipeline: Pipeline | None = None
    tensor: TensorParallel | None = None
    head: Head = PLAIN.head

    @classmethod
    def data_parallel_size(cls, options: Options, world_size: int) -> int:
        return options.copies(world_size)

    @classmethod
    def check(cls, options: Options, run: RunOptions) -> None:
        if run.compile != "none" and options.expert_parallel > 1:
            raise ConfigError(
                "run.compile: with expert_parallel, experts wait for token counts from other ranks; use none"
            )
        if run.compile == "model":
            raise ConfigError("run.compile: the megatron runner communicates between blocks; use blocks")

    @classmethod
    def check_model(cls, options: Options, run: RunOptions, model: Model) -> None:
        if options.expert_parallel > 1:
            check_experts(model, options.expert_parallel)
        plan = resolve(model, options.plan)
        if max(options.tensor_parallel, options.expert_parallel) > 1 and model.structure.reads_across:
            raise ConfigError(
                "run.runner: parts of the model (dora, adapters or four bits of experts) need whole weights; leave "
                "tensor_parallel and expert_parallel out"
            )
        if options.tensor_parallel > 1:
            shard_specs(model, plan, options.tensor_parallel)
        if options.sequence_parallel:
            ends_of(model, "sequence_parallel")
        if options.pipeline_parallel > 1:
            least = ends_of(model, "pipeline_parallel").first_blocks
            first = spread(len(model.structure.decoder_blocks()), options.stages, options.pipeline_layers)[0]
            if len(first) < least:
                raise ConfigError(
                    f"run.runner.pipeline_layers: the first {least} blocks read image features, so the first stage "
                    f"needs at least {least} blocks, but has {len(first)}"
                )

    @classmethod
    def layouts(cls, options: Options, at: PlanContext) -> list[Layout]:
        return layouts(options, at)

    def setup(self) -> None:
        options: Options = self.options
        super().setup()
        shape = options.mesh_shape(self.world.size)
        self.mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("pipeline", "data", "tensor"))
        if (ranks := options.expert_parallel) > 1:
            sizes = self.mesh["data"].size() // ranks, ranks
            self.expert_mesh = self.mesh._unflatten("data", sizes, ("expert_data", "expert"))
        self.copies, self.stages = (Group(self.mesh.get_group(name)) for name in ("data", "pipeline"))
        if options.context_parallel == 1:
            self.dp = self.copies
        self.rng = RngTracker(self.device, self.mesh.get_local_rank("tensor"))
        if options.tensor_parallel > 1:
            self.tensor = self.tensor_parallel(self.mesh.get_group("tensor"))
        self.tied_group: dist.ProcessGroup | None = None
        if options.pipeline_parallel > 1:
            ends = [[int(column[0]), int(column[-1])] for column in self.mesh.mesh.flatten(1).T]
            self.tied_group, _ = dist.new_subgroups_by_enumeration(ends)

    # ---- building

    def tensor_parallel(self, group: dist.ProcessGroup) -> TensorParallel:
        """Return the arithmetic of the tensor-parallel ranks."""
        return TensorParallel(group, self.options.sequence_parallel, self.rng)

    def expert_parallel(self, group: dist.ProcessGroup) -> ExpertParallel:
        """Return the arithmetic of the expert-parallel ranks."""
        return ExpertParallel(group)

    def plan(self, model: Model) -> Resolved:
        """Return the sharding plan of tensor parallelism."""
        return resolve(model, self.options.plan)

    def construct(self, make_model: Callable[[], Model]) -> Model:
        with parameters_on_meta():  # `prepare` allocates only this rank's part
            return make_model()

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        """Reduce the model to this rank's part, allocate it, and assign each parameter to a data-parallel strategy.

        The order matters: blocks are sharded before they are assigned to stages, the choice of a strategy depends on
        the size of this rank's part, and a strategy takes views of allocated memory.
        """
        self.model = self.module = model
        cut = self._cut(model)
        tied = self._keep_own_stage(model)
        materialize(model, self._choose_strategies(model))
        self._hook_blocks(model)
        self.shares = {p: self._share(name, p, cut, name in tied) for name, p in model.named_parameters()}
        self.tied = [share for share in self.shares.values() if share.name in tied and share.parameter.requires_grad]
        for strategy in self.strategies:
            strategy.watch([share for share in self.shares.values() if share.strategy is strategy])
        if make_optimizer is not None and (cut.specs or cut.experts or type(self.data_parallel) is not DDPStrategy):
            check_elementwise(make_optimizer)
        self.held.build_optimizer(make_optimizer)

    def _cut(self, model: Model) -> _Cut:
        """Shard the model: replace parameters with this rank's slices and experts."""
        plan = self.plan(model)
        cut = _Cut({name: p.shape for name, p in model.named_parameters()}, plan.summed)
        if self.options.expert_parallel > 1:
            cut.experts = self.expert_parallel(self.expert_mesh.get_group("expert")).shard(model)
        if self.tensor is not None:
            cut.specs = shard_model(model, plan, self.tensor, self.mesh["tensor"])
            self.head = ParallelHead(self.tensor)
        cut.summed |= self._on_split_sequences(model, cut.specs)
        return cut

    def _share(self, name: str, parameter: nn.Parameter, cut: _Cut, tied: bool) -> Share:
        """Return the share of a parameter that this rank updates."""
        spec, places = cut.specs.get(name), list[tuple[ShardSpec, int]]()
        if spec is not None and self.tensor is not None:
            places.append((spec, self.tensor.rank))
        if name in cut.experts:
            full = ShardSpec(tuple(cut.shapes[name]), 0, self.options.expert_parallel)
            places.append((full, self.expert_mesh.get_local_rank("expert")))
        strategy = self.strategies[-1] if name in cut.experts else self.data_parallel
        owned, start = strategy.own(parameter)
        weight = 1.0 if spec else 1 / self.options.tensor_parallel
        if type(strategy) is DDPStrategy:
            weight /= strategy.group.size
        if tied and self.stages.rank > 0:
            weight = 0.0  # only the first stage counts a tied parameter
        return Share(
            name,
            parameter,
            cut.shapes[name],
            places,
            nn.Parameter(owned, requires_grad=parameter.requires_grad),
            weight,
            name in cut.summed and not spec,
            strategy,
            start,
        )

    def _on_split_sequences(self, model: Model, cuts: dict[str, ShardSpec]) -> set[str]:
        """Return the names of the replicated parameters that each rank applies to its part of the sequence."""
        if not self.options.sequence_parallel:
            return set()
        there = {id(p) for module in modules_on_parts(model) for p in module.parameters()}
        return {name for name, p in model.named_parameters() if id(p) in there and name not in cuts}

    def _keep_own_stage(self, model: Model) -> set[str]:
        """Replace other ranks' modules with stubs, and return the names of parameters tied between two ranks."""
        blocks, options = model.structure.decoder_blocks(), self.options
        if options.pipeline_parallel == 1:
            self.spans = [(blocks[0], blocks[-1])]
            return set()
        ends, last = ends_of(model, "pipeline_parallel"), options.stages - 1
        ranges = spread(len(blocks), options.stages, options.pipeline_layers)
        tied, width = tied_names(model, ends), width_of(model, ends)
        mine = options.stages_of(self.stages.rank)
        here = {number for stage in mine for number in ranges[stage]}
        replace_modules(model, stubs(model, ends, here, 0 in mine, last in mine, counts=True))
        self.spans = [(blocks[ranges[stage][0]], blocks[ranges[stage][-1]]) for stage in mine]
        others = {stage: stubs(model, ends, ranges[stage], stage == 0, stage == last, counts=False) for stage in mine}
        more = self.rng, self.tensor, self.precision.autocast, self.timers, self.head
        stages = [Stage(model, stage, options.stages, others[stage], *more) for stage in mine]
        self.pipeline = Pipeline(stages, self.stages, options, width, self.device)
        return tied if options.rank_of(last) > 0 else set()

    def _choose_strategies(self, model: Model) -> torch.device:
        """Choose the data-parallel strategies (the last is for the experts), and return the parameters' device."""
        options, style = self.options, self.options.data_parallel_style
        offloads = options.offload == "cpu"
        experts = self.expert_mesh["expert_data"] if options.expert_parallel > 1 else None
        if style == "fsdp" or offloads:
            shard_parameters(model, self.mesh["data"], experts, offloads)
            make: Callable[[Group], DDPStrategy] = partial(FSDPStrategy, model=model)
        else:
            make = partial(ZeRO1Strategy if style == "zero1" else DDPStrategy, bucket_mb=options.bucket_mb)
        self.data_parallel = make(self.copies)
        self.strategies = [self.data_parallel]
        if experts is not None:
            self.strategies.append(make(Group(experts.get_group())))
        return torch.device("cpu") if offloads else self.device

    def _hook_blocks(self, model: Model) -> None:
        """Register hooks on the first and last block of each of this rank's stages.

        The pre-hooks run before FSDP's pre-hook, which reads the inputs.
        """
        stages: list[Any] = [None] if self.pipeline is None else self.pipeline.stages
        for stage, (first, last) in zip(stages, self.spans, strict=True):
            receives = stage is not None and not stage.is_first
            if receives:
                first.register_forward_pre_hook(stage.take_received, prepend=True)
            if self.tensor is not None and self.tensor.splits_sequence:
                sends = stage is not None and not stage.is_last
                self.tensor.hook(model, None if receives else first, last if sends else None)

    # ---- training

    def forward_backward(self, micro_batches: list[MicroBatch], num_targets: int) -> float:
        for strategy in self.strategies:
            strategy.start(len(micro_batches))
        if self.pipeline is None:
            loss = super().forward_backward(micro_batches, num_targets)
        else:
            loss = self._through_pipeline(self.pipeline, micro_batches, num_targets)
        with self.timers("allreduce"):
            for strategy in self.strategies:
                strategy.reduce_grads()
            if self.tensor is not None:
                sum_gradients([s.owned.grad for s in self.shares.values() if s.summed], self.tensor.group)
            sum_gradients([share.owned.grad for share in self.tied], self.tied_group)
        return loss

    def _through_pipeline(self, pipeline: Pipeline, micro_batches: list[MicroBatch], num_targets: int) -> float:
        def batch(number: int) -> Batch:
            seed_dropout(self, micro_batches[number])
            return self.objective.inputs(to_device(micro_batches[number].data, self.device))

        rows, length = max((len(m.data["input_ids"]), pipeline.stages[0].tokens(m.data)) for m in micro_batches)
        weight = self.precision.scaler.scale / num_targets
        losses = pipeline.train((rows, length), len(micro_batches), batch, weight, self.gradient_sync)
        self.micro_losses = list(losses) if pipeline.has_last else []
        # Tensor-parallel and context-parallel ranks all hold the same loss.
        mine = losses.sum().item() / (self.options.tensor_parallel * self.context.size)
        with self.timers("allreduce"):
            return self.world.all_reduce_sum(mine)[0] / num_targets

    def compute_loss(self, batch: Batch, mode: ForwardMode = PLAIN) -> Tensor:
        return super().compute_loss(batch, replace(mode, head=self.head))

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        self.data_parallel.before_backward(last)
        return nullcontext()

    @property
    def gradient_scale(self) -> float:
        return self.precision.scaler.scale / self.data_parallel.gradient_divisor

    def gradient_norm(self, gradients: list[Tensor]) -> float:
        """Return the norm over all ranks; replicated and tied parameters count once."""
        by_weight: dict[float, list[Tensor]] = {}
        for share in self.shares.values():
            if share.owned.grad is not None and share.owned.numel():
                by_weight.setdefault(share.norm_weight, []).append(share.owned.grad)
        square = sum(weight * global_norm(group) ** 2 for weight, group in by_weight.items() if weight)
        return self.world.all_reduce_sum(square)[0] ** 0.5

    def optimizer_step(self, apply: bool = True) -> StepResult:
        result = super().optimizer_step(apply)
        for share in self.shares.values():
            share.owned.grad = None
        if result.applied:
            self.loaded()
        return result

    # ---- evaluation

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        # In generation, not every length can be split evenly.
        whole = nullcontext() if self.tensor is None else patch.object(self.tensor, "splits_sequence", False)
        try:
            with whole, super().evaluating():
                yield
        finally:
            self.data_parallel.reshard()

    def evaluate(self, batch: Batch, mode: ForwardMode = PLAIN) -> Tensor:
        if self.pipeline is None:
            return super().evaluate(batch, replace(mode, head=self.head))
        assert self.model.vocab_size is not None
        return self.pipeline.evaluate(self.objective.inputs(to_device(batch, self.device), mode))

    # ---- state of this rank

    @cached_property
    def held(self) -> HeldState:
        return _SharesState(self)

    def loaded(self) -> None:
        with torch.no_grad():
            for strategy in self.strategies:
                strategy.sync_params()


class _SharesState(HeldState):
    """The shares of parameters that a rank updates."""

    runner: MegatronRunner

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        share = self.runner.shares.get(parameter) or self._by_owned.get(parameter)
        return share.shape if share else parameter.shape  # the placeholder of a frozen stage has no share

    @cached_property
    def _by_owned(self) -> dict[nn.Parameter, Share]:
        return {share.owned: share for share in self.runner.shares.values()}

    def weight(self, parameter: nn.Parameter) -> Tensor:
        fsdp = isinstance(self.runner.data_parallel, FSDPStrategy)
        return local(parameter.detach()) if fsdp else self.runner.shares[parameter].owned.detach()

    def state(self, parameter: nn.Parameter) -> dict[str, Any]:
        optimizer = self.runner.optimizer
        return optimizer.state.get(self.runner.shares[parameter].owned, {}) if optimizer else {}

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return self.runner.shares[parameter].owned.grad

    def pieces(self, parameter: nn.Parameter, held: Tensor, shape: torch.Size) -> list[Piece]:
        return without_padding(self.runner.shares[parameter].pieces(held), tuple(shape))

    def copies(self) -> Group:
        stages, world = self.runner.stages.size, self.runner.world
        # The ranks of a stage are consecutive.
        return world if stages == 1 else Group(dist.new_subgroups(world.size // stages)[0])

    def trained(self) -> NamedParameters:
        owned = [(share.name, share.owned) for share in self.runner.shares.values() if share.owned.numel()]
        if not any(parameter.requires_grad for _, parameter in owned):  # optimizers reject an empty list (frozen stage)
            owned.append(("nothing", nn.Parameter(torch.empty(0, device=self.runner.device))))
        return owned
