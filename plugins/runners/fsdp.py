"""Fully sharded data parallelism: every rank holds a shard of each parameter, and gathers one block at a time."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from crosstrain import (
    Capabilities,
    ConfigError,
    Layout,
    MakeOptimizer,
    Model,
    PlanContext,
    PositiveInt,
    Runner,
    RunOptions,
    Sizes,
    materialize,
    parameters_on_meta,
    registry,
)
from crosstrain.engine.precision import DTYPES

from .expert_parallel import ExpertOptions, ExpertParallel, check_compile, check_experts, fully_shard_experts
from .half_weights import computes_in_half, is_linear, linear_weights
from .shard_footprint import fully_sharded, with_experts


def gathers_half(options: Any, run: RunOptions, model: Model) -> bool:
    """Return True if linear layers are gathered in bf16."""
    return options.param_dtype == "amp" and options.expert_parallel == 1 and computes_in_half(run, model)


def unrounded(block: nn.Module) -> list[nn.Module]:
    """Return a block's modules with parameters that autocast does not round, such as norms."""
    own = [module for module in block.modules() if next(module.parameters(recurse=False), None) is not None]
    return [module for module in own if not is_linear(module)]


@registry.register_runner("fsdp")
class FSDPRunner(Runner):
    """torch's FSDP2: parameters, gradients and optimizer state are sharded over the ranks (ZeRO-3)."""

    @dataclass
    class Options(ExpertOptions):
        """Options of `run.runner` for fsdp."""

        shard_size: PositiveInt | None = None  # ranks that share a copy of the model (hybrid sharding); None: all
        reshard_after_forward: bool = True  # False: keep blocks gathered until their backward (ZeRO-2)
        cpu_offload: bool = False  # keep shards and optimizer state in host memory
        sync_each_micro_batch: bool = False  # reduce gradients after every micro batch; slower, saves memory
        # dtype in which linear layers of blocks are gathered; amp: bf16, their compute dtype, under run.amp=bf16
        param_dtype: Literal["amp", "fp32"] = "amp"
        reduce_dtype: Literal["fp32", "bf16"] = "fp32"  # dtype for summing gradients of weights gathered in bf16

    capabilities: ClassVar = Capabilities(needs_process_group=True, saves_memory=("sync_each_micro_batch=true",))
    module: FSDPModule  # type: ignore[assignment] # the model; fully_shard changes its class

    @classmethod
    def data_parallel_size(cls, options: Any, world_size: int) -> int:
        if world_size % (options.shard_size or world_size):
            raise ConfigError(
                f"run.runner.shard_size: {options.shard_size} does not divide the {world_size} ranks evenly"
            )
        if (options.shard_size or world_size) % options.expert_parallel:
            raise ConfigError(
                f"run.runner.expert_parallel: {options.expert_parallel} does not divide the "
                f"{options.shard_size or world_size} ranks of a copy evenly"
            )
        return super().data_parallel_size(options, world_size)

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        check_compile(options, run)
        if options.reduce_dtype == "bf16" and (options.param_dtype, run.amp.dtype, run.amp.linear) != (
            "amp",
            "bf16",
            None,
        ):
            raise ConfigError("run.runner.reduce_dtype: bf16 is for what run.amp=bf16 gathers in it, without float8")

    @classmethod
    def check_model(cls, options: Any, model: Model) -> None:
        check_experts(options, model)

    @classmethod
    def layouts(cls, options: Any, at: PlanContext) -> list[Layout]:
        ranks, experts, model = options.shard_size or at.world_size, options.expert_parallel, at.model
        if half := gathers_half(options, at.run, model):
            model = copy.deepcopy(model)
            for p in linear_weights(model):
                p.data = p.data.bfloat16()

        def layout(sizes: Sizes, ranks: int) -> Layout:
            return fully_sharded(
                sizes,
                at,
                ranks,
                regather=options.reshard_after_forward,
                offload=options.cpu_offload,
                every=options.sync_each_micro_batch,
                gathered=Sizes.of(model) if half else None,
                half_sums=options.reduce_dtype == "bf16",
            )

        if experts == 1:
            out = layout(Sizes.of(at.model), ranks)
            out.model, out.computes = (model, "linear layers in bf16") if half else (None, "")
            return [out]
        model = copy.deepcopy(at.model)
        ExpertParallel(cast(dist.ProcessGroup, dist.new_group(list(range(experts))))).shard(model)
        out = with_experts(model, ranks, experts, layout)
        out.model, out.computes = model, f"experts on {experts} ranks"
        return [out]

    def setup(self) -> None:
        super().setup()
        shard = self.options.shard_size or self.world.size
        sizes = (shard,) if shard == self.world.size else (self.world.size // shard, shard)
        self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
        if (experts := self.options.expert_parallel) > 1:
            self.expert_mesh = self.mesh._unflatten("shard", (shard // experts, experts), ("expert_data", "expert"))

    def construct(self, make_model: Callable[[], Model]) -> Model:
        with parameters_on_meta():  # `prepare` allocates only the shards
            return make_model()

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
            if self.options.cpu_offload
            else OffloadPolicy(),
        }
        if scalars := [name for name, p in model.weights.parameters().items() if p.ndim == 0]:
            raise ConfigError(f"run.runner: fsdp cannot cut {scalars[0]}, a scalar, into shards; use another runner")
        if self.options.expert_parallel > 1:
            self._shard_experts(model, options)
        in_blocks = options | {"reshard_after_forward": self.options.reshard_after_forward}
        half = MixedPrecisionPolicy(torch.bfloat16, DTYPES[self.options.reduce_dtype], cast_forward_inputs=False)
        for block in model.blocks():
            apart = unrounded(block) if gathers_half(self.options, self.run, model) else [block]
            if apart and block not in apart:
                fully_shard(apart, **in_blocks)
            fully_shard(block, **in_blocks | ({} if block in apart else {"mp_policy": half}))
        # Parameters outside the blocks, such as the embedding and the head, are needed again when the backward starts.
        fully_shard(model, reshard_after_forward=False, **options)
        materialize(model, torch.device("cpu") if self.options.cpu_offload else self.device)
        super().prepare(model, make_optimizer)

    def _shard_experts(self, model: Model, options: dict[str, Any]) -> None:
        """Keep this rank's experts of each layer; shard their features over the ranks that hold the same experts."""
        mesh = self.expert_mesh["expert"]
        names, same = ExpertParallel(mesh.get_group()).shard(model), self.expert_mesh["expert_data"].size()
        for name in names:
            owner, _, own = name.rpartition(".")
            module, mine = model.get_submodule(owner), model.get_parameter(name)
            if mine.shape[1] % same:
                raise ConfigError(
                    f"run.runner.expert_parallel: {model.weights.canonical_name(name)} has {mine.shape[1]} features, "
                    f"which {same} ranks with the same experts cannot share evenly; use the megatron runner"
                )
            whole = DTensor.from_local(mine.detach(), mesh, [Shard(0)], run_check=False)
            module._parameters[own] = nn.Parameter(whole, mine.requires_grad)
        data = tuple(name for name in self.expert_mesh.mesh_dim_names or () if name != "expert")
        fully_shard_experts(
            model,
            copies=self.world.size,
            reshard_after_forward=self.options.reshard_after_forward,
            shard_placement_fn=lambda _: Shard(1),
            **options | {"mesh": self.expert_mesh[data]},
        )

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        self.module.set_requires_gradient_sync(last or self.options.sync_each_micro_batch)
        self.module.set_is_last_backward(last)
        yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        try:
            with super().evaluating():
                yield
        finally:  # no backward follows that would reshard gathered parameters
            for module in self.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
