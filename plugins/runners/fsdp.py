"""Fully sharded data parallelism: every rank holds a shard of each parameter, and gathers one block at a time."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from crosstrain import (
    Capabilities,
    ConfigError,
    ContextOptions,
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

from .sharding import computes_in_half, fully_sharded, is_linear, linear_weights, reshard

# Meshes get different names, because DTensor's caches take meshes with the same names and ranks for one mesh. A mesh
# that is made after ranks were lost or added would then get results for this rank's place in an older mesh.
_meshes = count()


def gathers_half(options: Any, run: RunOptions, model: Model) -> bool:
    """Return True if linear layers are gathered in bf16."""
    return options.param_dtype == "amp" and computes_in_half(run, model)


@registry.register_runner("fsdp")
class FSDPRunner(Runner):
    """torch's FSDP2: parameters, gradients and optimizer state are sharded over the ranks (ZeRO-3)."""

    @dataclass
    class Options(ContextOptions):
        """Options of `run.runner` for fsdp."""

        elsewhere: ClassVar = {"expert_parallel": "the runner `megatron` has it, with data_parallel_style: fsdp"}
        former: ClassVar = {"expert_parallel": 1}

        shard_size: PositiveInt | None = None  # ranks per copy of the model (hybrid sharding); None: all ranks
        reshard_after_forward: bool = True  # False: keep blocks gathered until their backward (ZeRO-2)
        cpu_offload: bool = False  # keep shards and optimizer state in host memory
        sync_each_micro_batch: bool = False  # reduce gradients after every micro batch; slower, but saves memory
        # dtype in which the weights of the blocks' linear layers are gathered; amp: bf16 if they are used only in bf16
        # matmuls (run.amp=bf16 without compile, DoRA or QLoRA), else fp32
        param_dtype: Literal["amp", "fp32"] = "amp"
        # dtype in which gradients are reduced, for weights gathered in bf16
        reduce_dtype: Literal["fp32", "bf16"] = "fp32"

    capabilities: ClassVar = Capabilities(
        bitwise="crosstrain_plugins.builtin.runners.bitwise.fsdp:BitwiseFSDP",
        needs_process_group=True,
        forms_teams=True,
        rejoins=True,
        saves_memory=("sync_each_micro_batch=true",),
    )
    module: FSDPModule  # type: ignore[assignment] # the model; fully_shard changes its class

    @classmethod
    def data_parallel_size(cls, options: Any, world_size: int) -> int:
        if world_size % (options.shard_size or world_size):
            raise ConfigError(
                f"run.runner.shard_size: {options.shard_size} does not divide the {world_size} ranks evenly"
            )
        return super().data_parallel_size(options, world_size)

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        if options.reduce_dtype == "bf16" and (options.param_dtype, run.amp.dtype, run.amp.linear) != (
            "amp",
            "bf16",
            None,
        ):
            raise ConfigError("run.runner.reduce_dtype: bf16 needs param_dtype=amp and run.amp=bf16, without float8")

    @classmethod
    def layouts(cls, options: Any, at: PlanContext) -> list[Layout]:
        half = gathers_half(options, at.run, at.model)
        gathered = at.model
        if half:
            gathered = copy.deepcopy(at.model)
            for p in linear_weights(gathered):
                p.data = p.data.bfloat16()
        out = fully_sharded(
            Sizes.of(at.model),
            at,
            options.shard_size or at.world_size,
            regather=options.reshard_after_forward,
            offload=options.cpu_offload,
            every=options.sync_each_micro_batch,
            gathered=Sizes.of(gathered),
            half_sums=options.reduce_dtype == "bf16",
        )
        if half:
            out.model, out.computes = gathered, "linear layers in bf16"
        return [out]

    def _make_mesh(self) -> DeviceMesh:
        shard, number = self.options.shard_size or self.team.size, next(_meshes)
        names = f"replicate{number}", f"shard{number}"
        if shard == self.team.size:
            return DeviceMesh.from_group(self.team.handle, self.device.type, mesh_dim_names=names[1:])
        if self.team is not self.world:
            raise ConfigError(f"run.runner.shard_size: {shard} splits a team of {self.team.size} ranks; leave it out")
        return init_device_mesh(self.device.type, (self.world.size // shard, shard), mesh_dim_names=names)

    def construct(self, make_model: Callable[[], Model]) -> Model:
        with parameters_on_meta():  # `prepare` allocates only the shards
            return make_model()

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        options: dict[str, Any] = {
            "mesh": self._make_mesh(),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
            if self.options.cpu_offload
            else OffloadPolicy(),
        }
        if scalars := [name for name, p in model.weights.parameters().items() if p.ndim == 0]:
            raise ConfigError(f"run.runner: fsdp cannot shard the scalar {scalars[0]}; use a different runner")
        in_blocks = options | {"reshard_after_forward": self.options.reshard_after_forward}
        half = MixedPrecisionPolicy(torch.bfloat16, DTYPES[self.options.reduce_dtype], cast_forward_inputs=False)
        for block in model.blocks():
            apart = (  # modules with parameters that autocast does not round, such as norms
                [m for m in block.modules() if not is_linear(m) and next(m.parameters(recurse=False), None) is not None]
                if gathers_half(self.options, self.run, model)
                else [block]
            )
            if apart and block not in apart:
                fully_shard(apart, **in_blocks)
            fully_shard(block, **in_blocks | ({} if block in apart else {"mp_policy": half}))
        # The parameters outside the blocks form one group. The backward starts with the head, so it would gather this
        # group again at once.
        fully_shard(model, reshard_after_forward=False, **options)
        materialize(model, torch.device("cpu") if self.options.cpu_offload else self.device)
        super().prepare(model, make_optimizer)

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        self.module.set_requires_gradient_sync(last or self.options.sync_each_micro_batch)
        self.module.set_is_last_backward(last)
        try:
            yield
        except Exception:  # a lost rank ends the step; the shards are the state to go on from
            reshard(self.model)
            raise

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        try:
            with super().evaluating():
                yield
        finally:  # no backward follows that would reshard gathered parameters
            reshard(self.model)
