"""A rank's state at stage 3, partly on an NVMe device."""

import dataclasses
import hashlib
import os
import shutil
import socket
from pathlib import Path
from typing import Any

from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.swap_tensor.utils import MIN_AIO_BYTES
from torch import Tensor, nn

from crosstrain import ConfigError, Model, Runner, log

from .partition import Stage3


def fitted(options: Any, model: Model, ranks: int) -> Any:
    """Return the runner's options, with DeepSpeed's defaults replaced by values that work with parameters on NVMe.

    A parameter occupies a buffer while it is gathered, so reuse is off: only the parameters of one block, and the
    parameters outside of the blocks, are gathered at a time. Prefetching is off too, because it fails on a parameter
    that is used twice. Raises ConfigError if the configured buffers are too few or too small for `model`.
    """
    offload = options.offload_param
    if offload is None or offload.device != "nvme":
        return options
    shares = {p: -(-p.numel() // ranks) for p in model.parameters()}
    moved = {p for p, share in shares.items() if share * 4 >= max(MIN_AIO_BYTES, options.aio.block_size)}
    blocks = [moved.intersection(block.parameters()) for block in model.blocks()]
    count = len(moved.difference(*blocks)) + max(map(len, blocks), default=0)
    sizes = {"buffer_count": max(count, 1), "buffer_size": max(shares.values(), default=1)}
    for key, needed in sizes.items():
        if (given := getattr(offload, key)) != getattr(type(offload), key):
            sizes[key] = given
            if given < needed:
                raise ConfigError(f"run.runner.offload_param.{key}: this model needs at least {needed}, got {given}")
    ahead = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    for key in ahead:
        if (given := getattr(options, key)) not in (0, getattr(type(options), key)):
            log.info("run.runner.%s is 0 instead of %g: DeepSpeed fails otherwise with parameters on NVMe", key, given)
    return dataclasses.replace(options, offload_param=dataclasses.replace(offload, **sizes), **ahead)


def swap_folder(device: Path, output_dir: str) -> Path:
    """Return this process's own folder on a device, because DeepSpeed's file names are the same in every run.

    Removes the folders of killed processes of the same run.
    """
    run = hashlib.sha256(os.path.abspath(output_dir).encode()).hexdigest()[:12]
    prefix = f"crosstrain-{run}-{socket.gethostname()}-"
    for folder in device.glob(f"{prefix}*"):
        if not Path("/proc", folder.name.removeprefix(prefix)).exists():
            shutil.rmtree(folder, ignore_errors=True)
    return device / f"{prefix}{os.getpid()}"


class SwappedStage3(Stage3):
    """Stage 3 with NVMe: swapped tensors are staged in host memory while a checkpoint is saved or loaded."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._flats: dict[int, tuple[Tensor, dict[str, Any]]] = {}
        self._partitions: dict[nn.Parameter, Tensor] = {}

    def create_group_state(self, group: int) -> None:
        if not self.zero._swappable_optimizer_subgroup(group):
            return super().create_group_state(group)
        self.zero._optimizer_states_and_gradient_swap_in(group)
        super().create_group_state(group)
        self.zero._optimizer_states_and_gradient_swap_out(group)

    def flat(self, group: int) -> tuple[Tensor, dict[str, Any]]:
        if not self.zero._swappable_optimizer_subgroup(group):
            return super().flat(group)
        if group not in self._flats:
            self.zero._optimizer_states_and_gradient_swap_in(group)
            flat, state = super().flat(group)
            copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
            self._flats[group] = flat.detach().clone(), copies
            self.zero._release_swap_buffers(group)
        return self._flats[group]

    def own_partition(self, parameter: Any) -> Tensor:
        if parameter.ds_tensor.status is PartitionedParamStatus.AVAILABLE:
            return super().own_partition(parameter)
        if parameter not in self._partitions:
            swapper = parameter.nvme_swapper
            swapper.swap_in([parameter], async_op=False)
            self._partitions[parameter] = parameter.ds_tensor.detach().clone()
            swapper.remove_partition_and_release_buffers([parameter])
        return self._partitions[parameter]

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = super().gradient(parameter)
        return None if gradient is None else gradient.clone()  # DeepSpeed reuses the buffer

    def begin_step(self) -> None:
        super().begin_step()
        self._flats.clear()
        self._partitions.clear()

    def loaded(self) -> None:
        for parameter, partition in self._partitions.items():
            parameter.nvme_swapper.swap_out_partitioned_params([parameter], [partition])
        super().loaded()
        self._flats.clear()
        self._partitions.clear()

    def bring_up_to_date(self, group: int) -> None:
        if not self.zero._swappable_optimizer_subgroup(group):
            return super().bring_up_to_date(group)
        staged, staged_state = self.flat(group)
        self.zero._optimizer_states_and_gradient_swap_in(group)
        flat, state = super().flat(group)
        flat.data.copy_(staged)
        for key, value in staged_state.items():
            if isinstance(value, Tensor):
                state[key].copy_(value)
        super().bring_up_to_date(group)
        self.zero._optimizer_states_and_gradient_swap_out(group)
