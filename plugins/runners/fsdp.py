"""Fully sharded data parallelism: every rank holds a share of each parameter and gathers a block when it computes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from crosstrain import (
    ConfigError,
    Layout,
    MakeOptimizer,
    Model,
    PlanContext,
    PositiveInt,
    Runner,
    Sizes,
    materialize,
    parameters_on_meta,
    registry,
)
from crosstrain.engine.footprint import fully_sharded


@registry.register_runner("fsdp")
class FSDPRunner(Runner):
    """torch's FSDP2: parameters, gradients and optimizer state are sharded over the ranks (ZeRO-3)."""

    @dataclass
    class Options:
        """Options of `run.runner` for fsdp."""

        shard_size: PositiveInt | None = None  # ranks that share one copy of the model (hybrid sharding); None: all
        reshard_after_forward: bool = True  # False: blocks stay gathered until their backward (ZeRO-2): faster
        cpu_offload: bool = False  # shards and optimizer live in host memory
        sync_each_micro_batch: bool = False  # reduce gradients after every micro batch: slower, but no full gradients

    needs_process_group = True
    saves_memory: ClassVar = ("sync_each_micro_batch=true",)
    module: FSDPModule  # type: ignore[assignment] # the model itself, whose class fully_shard changes

    @classmethod
    def data_parallel_size(cls, options: Any, world_size: int) -> int:
        if world_size % (options.shard_size or world_size):
            raise ConfigError(
                f"run.runner.shard_size: {options.shard_size} does not divide the {world_size} ranks evenly"
            )
        return world_size

    @classmethod
    def layouts(cls, options: Any, at: PlanContext) -> list[Layout]:
        ranks = options.shard_size or at.world_size
        return [
            fully_sharded(
                Sizes.of(at.model), at, ranks, regather=options.reshard_after_forward, offload=options.cpu_offload,
                every=options.sync_each_micro_batch,
            )
        ]  # fmt: skip

    def setup(self) -> None:
        super().setup()
        shard = self.options.shard_size or self.world.size
        sizes = (shard,) if shard == self.world.size else (self.world.size // shard, shard)
        self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])

    def construct(self, make_model: Callable[[], Model]) -> Model:
        with parameters_on_meta():  # memory is given to the shards alone, in `prepare`
            return make_model()

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
            if self.options.cpu_offload
            else OffloadPolicy(),
        }
        if scalars := [name for name, p in model.canonical_parameters().items() if p.ndim == 0]:
            raise ConfigError(f"run.runner: fsdp cannot cut {scalars[0]}, a scalar, into shards; use another runner")
        for block in model.blocks():
            fully_shard(block, reshard_after_forward=self.options.reshard_after_forward, **options)
        # What is outside the blocks, the embedding and the head among it, is needed again as soon as backward begins.
        fully_shard(model, reshard_after_forward=False, **options)
        materialize(model, torch.device("cpu") if self.options.cpu_offload else self.device)
        super().prepare(model, make_optimizer)

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
        finally:  # no backward follows that would put what is still gathered back into its shards
            for module in self.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
