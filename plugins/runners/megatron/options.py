"""Options of the megatron runner, and the layout of ranks that follows from them."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from crosstrain import ConfigError, ExpertOptions, OptionError, PositiveInt, Text


@dataclass
class Options(ExpertOptions):
    """Options of `run.runner` for megatron."""

    tensor_parallel: PositiveInt = 1  # ranks that share every block: each holds a part of its matrices
    pipeline_parallel: PositiveInt = 1  # ranks that share the blocks, each with stages: runs of consecutive blocks
    data_parallel: PositiveInt | Literal["auto"] = "auto"  # copies of all that; auto: what the number of ranks allows
    sequence_parallel: bool = False  # between the matrices, tensor-parallel ranks share the sequence too
    data_parallel_style: Literal["allreduce", "zero1", "fsdp"] | None = None  # None: allreduce; with offload fsdp
    bucket_mb: Annotated[int, Interval(ge=1, le=2**20)] = 25  # gradients are exchanged in buckets of this many MiB
    pipeline_chunks: PositiveInt = 1  # stages of each of these ranks: more of them, shorter, wait less and send more
    # Order of micro batches; gpipe: forwards first; zero_bubble, zbv: gradients of weights fill what 1f1b leaves idle.
    pipeline_schedule: Literal["1f1b", "gpipe", "zero_bubble", "zbv"] = "1f1b"
    pipeline_layers: list[PositiveInt] | None = None  # blocks of each stage; None: as even as it goes
    offload: Literal["none", "cpu", "auto"] = "none"  # cpu: parameters and optimizer state are in host memory
    plan: dict[Text, Text] = field(default_factory=dict)  # pattern of parameter names -> style, over the model's own

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise OptionError("sequence_parallel", "tensor-parallel ranks share the sequence, and there are none")
        layers = self.pipeline_layers
        if layers is not None and len(layers) != self.stages:
            raise OptionError(
                "pipeline_layers", f"{layers} must say for each of the {self.stages} stages how many blocks it has"
            )
        if self.pipeline_chunks > 1 and self.pipeline_parallel == 1:
            raise OptionError("pipeline_chunks", "a pipeline's ranks have several stages, and there is no pipeline")
        chunks = {"zero_bubble": 1, "zbv": 2}.get(self.pipeline_schedule, self.pipeline_chunks)
        if self.pipeline_chunks != chunks:
            raise OptionError("pipeline_schedule", f"{self.pipeline_schedule} takes pipeline_chunks {chunks}")
        gathers = self.data_parallel_style == "fsdp" or self.offload != "none"
        if gathers and (self.pipeline_chunks > 1 or self.splits_backward):
            key = "pipeline_chunks" if self.pipeline_chunks > 1 else "pipeline_schedule"
            raise OptionError(key, "fsdp and offload take one stage on each rank, under 1f1b or gpipe")
        if self.offload == "cpu" and self.data_parallel_style not in (None, "fsdp"):
            raise OptionError("offload", f"data_parallel_style {self.data_parallel_style} keeps parameters on devices")

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pipeline_parallel * self.pipeline_chunks

    @property
    def splits_backward(self) -> bool:
        """True for schedules that compute the gradients of weights later than those of inputs."""
        return self.pipeline_schedule in ("zero_bubble", "zbv")

    def mesh_shape(self, world_size: int) -> tuple[int, int, int]:
        """Ranks along the dimensions pipeline, data and tensor of the mesh."""
        copies = self.copies(world_size) * self.context_parallel
        return self.pipeline_parallel, copies, self.tensor_parallel

    def replicas(self, world_size: int) -> list[list[int]]:
        _, copies, tensor = self.mesh_shape(world_size)
        return [
            [*range(stage + rank, stage + copies * tensor, tensor)]
            for stage in range(0, world_size, copies * tensor) for rank in range(tensor)
        ]  # fmt: skip

    def copies(self, world_size: int) -> int:
        """Number of data-parallel copies on `world_size` ranks. Raises ConfigError where the layout does not fit."""
        sizes = {key: getattr(self, key) for key in ("tensor_parallel", "context_parallel", "pipeline_parallel")}
        ranks = math.prod(sizes.values())
        layout = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1) or "tensor_parallel 1"
        if self.data_parallel != "auto":
            if ranks * self.data_parallel != world_size:
                raise ConfigError(
                    f"run.runner: {layout} x data_parallel {self.data_parallel} takes "
                    f"{ranks * self.data_parallel} ranks, and there are {world_size}"
                )
        elif world_size % ranks:
            raise ConfigError(f"run.runner: {layout} = {ranks} ranks do not divide the {world_size} that there are")
        copies = world_size // ranks
        if copies * self.context_parallel % self.expert_parallel:
            raise ConfigError(
                f"run.runner.expert_parallel: {self.expert_parallel} does not divide the {copies} data-parallel copies "
                f"of {layout} on {world_size} ranks"
            )
        return copies
