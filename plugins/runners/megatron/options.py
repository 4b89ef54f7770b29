"""Options of the megatron runner, and the layout of ranks that follows from them."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from crosstrain import ConfigError, ContextOptions, OptionError, PositiveInt, Text


@dataclass
class Options(ContextOptions):
    """Options of `run.runner` for megatron."""

    tensor_parallel: PositiveInt = 1  # ranks that share every block: each holds a part of its matrices
    pipeline_parallel: PositiveInt = 1  # stages, each a run of consecutive blocks on its own ranks
    expert_parallel: PositiveInt = 1  # data-parallel copies that share the experts: each holds some of them
    data_parallel: PositiveInt | Literal["auto"] = "auto"  # copies of all that; auto: what the number of ranks allows
    sequence_parallel: bool = False  # between the matrices, tensor-parallel ranks share the sequence too
    data_parallel_style: Literal["allreduce", "zero1", "fsdp"] | None = None  # None: allreduce; with offload fsdp
    bucket_mb: Annotated[int, Interval(ge=1, le=2**20)] = 25  # gradients are exchanged in buckets of this many MiB
    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"  # order of micro batches; gpipe: forwards first
    pipeline_layers: list[PositiveInt] | None = None  # blocks of each stage; None: as even as it goes
    offload: Literal["none", "cpu", "auto"] = "none"  # cpu: parameters and optimizer state are in host memory
    plan: dict[Text, Text] = field(default_factory=dict)  # pattern of parameter names -> style, over the model's own

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise OptionError("sequence_parallel", "tensor-parallel ranks share the sequence, and there are none")
        layers = self.pipeline_layers
        if layers is not None and len(layers) != self.pipeline_parallel:
            raise OptionError(
                "pipeline_layers",
                f"{layers} must say for each of the {self.pipeline_parallel} stages how many blocks it has",
            )
        if self.offload == "cpu" and self.data_parallel_style not in (None, "fsdp"):
            raise OptionError("offload", f"data_parallel_style {self.data_parallel_style} keeps parameters on devices")

    def copies(self, world_size: int) -> int:
        """Number of data-parallel copies on `world_size` ranks. Raises ConfigError where the layout does not fit."""
        sizes = {key: getattr(self, key) for key in ("tensor_parallel", "context_parallel", "pipeline_parallel")}
        ranks = math.prod(sizes.values())
        layout = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1 or key != "context_parallel")
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
