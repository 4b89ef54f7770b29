"""Options of the megatron runner, and the rank layout that they define."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from crosstrain import ConfigError, ContextOptions, OptionError, PositiveInt, Text


@dataclass
class Options(ContextOptions):
    """Options of `run.runner` for megatron."""

    expert_parallel: PositiveInt = 1  # ranks that split the experts; ranks with the same experts sum their gradients
    tensor_parallel: PositiveInt = 1  # number of ranks over which the matrices of each block are sharded
    pipeline_parallel: PositiveInt = 1  # ranks of a pipeline; each rank holds one or more stages of consecutive blocks
    data_parallel: PositiveInt | Literal["auto"] = "auto"  # copies of the model; auto: as many as the ranks allow
    sequence_parallel: bool = False  # also split the sequence over tensor-parallel ranks, outside the sharded matrices
    data_parallel_style: Literal["allreduce", "zero1", "fsdp"] | None = None  # None: allreduce; fsdp if offload is cpu
    bucket_mb: Annotated[int, Interval(ge=1, le=2**20)] = 25  # size of gradient buckets in MiB
    pipeline_chunks: PositiveInt = 1  # stages per rank; more stages reduce idle time but communicate more
    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"  # order of micro batches; gpipe: all forwards first
    pipeline_layers: list[PositiveInt] | None = None  # blocks per stage; None: equal; earlier stages get the remainder
    offload: Literal["none", "cpu"] = "none"  # cpu: keep parameters and optimizer state in host memory
    plan: dict[Text, Text] = field(default_factory=dict)  # parameter name pattern -> style; overrides the model's plan

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise OptionError(
                "sequence_parallel", "needs tensor_parallel above 1, because tensor-parallel ranks split the sequence"
            )
        layers = self.pipeline_layers
        if layers is not None and len(layers) != self.stages:
            raise OptionError(
                "pipeline_layers", f"expected the number of blocks of each of the {self.stages} stages, got {layers}"
            )
        if self.pipeline_chunks > 1 and self.pipeline_parallel == 1:
            raise OptionError("pipeline_chunks", "needs pipeline_parallel above 1")
        if self.pipeline_chunks > 1 and (self.data_parallel_style == "fsdp" or self.offload == "cpu"):
            raise OptionError("pipeline_chunks", "fsdp and offload support only one stage per rank")
        if self.offload == "cpu" and self.data_parallel_style not in (None, "fsdp"):
            raise OptionError(
                "offload",
                f"cpu needs data_parallel_style fsdp; {self.data_parallel_style} keeps parameters on the device",
            )

    @property
    def stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.pipeline_parallel * self.pipeline_chunks

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank of a stage. Stages are assigned round robin."""
        return stage % self.pipeline_parallel

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a pipeline rank, in order."""
        return list(range(rank, self.stages, self.pipeline_parallel))

    def mesh_shape(self, world_size: int) -> tuple[int, int, int]:
        """Return the sizes of the mesh dimensions (pipeline, data, tensor)."""
        return self.pipeline_parallel, self.copies(world_size) * self.context_parallel, self.tensor_parallel

    def replicas(self, world_size: int) -> list[list[int]]:
        _, copies, tensor = self.mesh_shape(world_size)
        return [
            list(range(stage + rank, stage + copies * tensor, tensor))
            for stage in range(0, world_size, copies * tensor)
            for rank in range(tensor)
        ]

    def copies(self, world_size: int) -> int:
        """Return the number of data-parallel copies. Raises ConfigError if the layout does not fit the ranks."""
        sizes = {key: getattr(self, key) for key in ("tensor_parallel", "context_parallel", "pipeline_parallel")}
        ranks = math.prod(sizes.values())
        layout = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1) or "tensor_parallel 1"
        if self.data_parallel != "auto":
            if ranks * self.data_parallel != world_size:
                raise ConfigError(
                    f"run.runner: {layout} x data_parallel {self.data_parallel} needs "
                    f"{ranks * self.data_parallel} ranks, but there are {world_size}"
                )
        elif world_size % ranks:
            raise ConfigError(f"run.runner: {layout} needs a multiple of {ranks} ranks, but there are {world_size}")
        copies = world_size // ranks
        if copies * self.context_parallel % self.expert_parallel:
            raise ConfigError(
                f"run.runner.expert_parallel: {self.expert_parallel} does not divide the {copies} data-parallel copies "
                f"of {layout} on {world_size} ranks"
            )
        return copies
