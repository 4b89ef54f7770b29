"""Options of the deepspeed runner, generated from DeepSpeed's configuration model.

Keys of `zero_optimization` in the installed DeepSpeed become typed options under their own names, except those in
`_NOT_OFFERED`.
"""

import dataclasses
import enum
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel, ValidationError

from crosstrain import ContextOptions, OptionError, PositiveInt, to_plain
from crosstrain.config.describe import meanings

_NOT_OFFERED = {
    "stage",  # our own option, declared below
    "elastic_checkpoint", "load_from_fp32_weights", "legacy_stage1", "pipeline_loading_checkpoint",  # for checkpoints
    "zenflow", "compute_grad_norm", "save_muon_momentum_buffer_in_memory",  # results would differ from other runners'
    "stage3_module_granularity_threshold",  # DeepSpeed 0.19 fails with this option
    "ratio", "super_offload", "cpuadam_cores_perc",  # need a DeepSpeed optimizer
    "round_robin_gradients",  # checkpoints could not determine which part of the state each rank holds
    "zero_hpz_partition_size",  # its second copy of the parameters is not updated when a checkpoint is loaded
    "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",  # lossy; need a GPU
}  # fmt: skip

_STAGES_1_2 = {
    "allgather_partitions", "allgather_bucket_size", "reduce_scatter", "use_multi_rank_bucket_allreduce",
    "parameter_alignment", "ignore_unused_parameters",
}  # fmt: skip
_STAGES_1_2_3 = {"contiguous_gradients", "reduce_bucket_size", "overlap_comm", "offload_optimizer"}


def _hint(annotation: Any) -> Any:
    """Convert a pydantic annotation to a type that the platform's checker supports."""
    if get_origin(annotation) in (Union, types.UnionType):
        return Union[tuple(map(_hint, get_args(annotation)))]  # noqa: UP007 - the types are known only at run time
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _options(annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return Literal[tuple(member.value for member in annotation)]
    if annotation is int:
        return int | float  # YAML reads 3e8, common in DeepSpeed's examples, as a float
    return annotation if annotation in (bool, float, str, Path, type(None)) else Any


def _options(model: type[BaseModel], base: type = object) -> type:
    """Return a dataclass with the fields and defaults of `model`, named as in DeepSpeed's configuration files."""
    fields: list[tuple[str, Any, Any]] = []
    said = meanings(model)
    for name, info in model.model_fields.items():
        key = info.alias or name
        deprecated = isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("deprecated")
        if deprecated or key in _NOT_OFFERED:
            continue
        if info.default_factory is not None or isinstance(info.default, BaseModel):
            hint, default = Any, None
        else:
            default = info.default.value if isinstance(info.default, enum.Enum) else info.default
            default = int(default) if isinstance(default, int) and not isinstance(default, bool) else default
            hint = _hint(info.annotation)
            hint = Annotated[hint, *info.metadata] if info.metadata else hint  # pydantic uses annotated_types too
        fields.append((key, hint, field(default=default, metadata={"meaning": said.get(name)})))
    return dataclasses.make_dataclass(model.__name__, fields, bases=(base,), namespace={"__module__": __name__})


@dataclass
class AsyncIO:
    """DeepSpeed's `aio`: how tensors are moved to and from an NVMe device."""

    block_size: PositiveInt = 1048576  # bytes per request
    queue_depth: PositiveInt = 8  # requests in flight
    intra_op_parallelism: PositiveInt = 1  # threads per tensor
    single_submit: bool = False  # submit requests one by one
    overlap_events: bool = True  # submit requests without waiting for earlier ones


@dataclass
class _Base(ContextOptions):
    elsewhere: ClassVar = {"communication_data_type": "none: param_dtype: bf16 keeps and sends gradients in bf16"}
    former: ClassVar = {
        "communication_data_type": "fp32",
        "dump_state": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }

    stage: Literal[0, 1, 2, 3] = 1  # ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also parameters; 0: none
    # amp: gather weights in bf16 if run.amp=bf16 rounds them anyway; bf16: keep all parameters and gradients in bf16
    param_dtype: Literal["amp", "fp32", "bf16"] = "amp"
    aio: AsyncIO = field(default_factory=AsyncIO)

    def __post_init__(self) -> None:
        for key in self.given():
            if not self._used(key):
                raise OptionError(key, f"ZeRO stage {self.stage} ignores it; remove it, or choose a different stage")
        if self.allgather_bucket_size % 2:
            raise OptionError("allgather_bucket_size", f"expected an even number, got {self.allgather_bucket_size}")
        if self.param_dtype == "bf16" and (self.stage == 0 or self.nvme_paths):
            raise OptionError("param_dtype", "bf16 needs ZeRO stage 1, 2 or 3, without nvme")
        for key in ("offload_optimizer", "offload_param"):
            offload = getattr(self, key)
            if offload is None or offload.device != "nvme":
                continue
            if self.stage < 3:
                raise OptionError(key, f"offloading to nvme needs ZeRO stage 3, not {self.stage}")
            if offload.nvme_path is None:
                raise OptionError(key, "offloading to nvme needs nvme_path, a folder on the device")
            if key == "offload_optimizer":
                needed = 4 * (1 + offload.pipeline_read + offload.pipeline_write)
                if offload.buffer_count < needed:
                    raise OptionError(
                        f"{key}.buffer_count",
                        f"expected at least {needed} for this pipeline, got {offload.buffer_count}",
                    )
        try:
            DeepSpeedZeroConfig(**self.zero())
        except ValidationError as error:
            problem = error.errors()[0]
            path = ".".join(map(str, problem["loc"])) or "stage"
            raise OptionError(path, f"DeepSpeed rejects it: {problem['msg']}") from None

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload_optimizer is not None and self.offload_optimizer.device != "none"

    @property
    def nvme_paths(self) -> list[Path]:
        """Folders on NVMe devices; empty without offloading to NVMe."""
        offloads = [o for o in (self.offload_optimizer, self.offload_param) if o is not None and o.device == "nvme"]
        return [Path(o.nvme_path) for o in offloads]

    def given(self) -> dict[str, Any]:
        """Return the ZeRO options that differ from DeepSpeed's defaults."""
        own = {f.name for f in dataclasses.fields(_Base)}
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in own and getattr(self, f.name) != f.default
        }

    def _used(self, key: str) -> bool:
        if key in _STAGES_1_2:
            return self.stage in (1, 2)
        return self.stage >= 1 if key in _STAGES_1_2_3 else self.stage == 3

    def zero(self, swap_folder: Callable[[Path], Path] = lambda path: path) -> dict[str, Any]:
        """Return DeepSpeed's `zero_optimization` section, with `swap_folder(nvme_path)` in place of `nvme_path`."""
        plain: dict[str, Any] = {"stage": self.stage}
        for key, value in self.given().items():
            plain[key] = to_plain(value)
            if key in ("offload_optimizer", "offload_param") and plain[key]["nvme_path"] is not None:
                plain[key]["nvme_path"] = str(swap_folder(Path(plain[key]["nvme_path"])))
        return plain


Options = _options(DeepSpeedZeroConfig, _Base)
