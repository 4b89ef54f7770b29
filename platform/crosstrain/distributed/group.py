"""Talking to the other ranks; with one process everything here is the identity."""

from __future__ import annotations

import os
import sys
import warnings
import zlib
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from crosstrain.distributed.watchdog import watchdog
from crosstrain.utils.errors import ConfigError

T = TypeVar("T")

# Libraries still call these by the names that torch 2.13 and 2.14 deprecate; torch 2.15 keeps both names.
warnings.filterwarnings(
    "ignore", r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning
)


class Group:
    """The ranks that do something together. One process needs no process group and gets none."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.rank = dist.get_rank(process_group) if process_group else 0
        self.size = dist.get_world_size(process_group) if process_group else 1

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks. For small Python objects, never for tensors."""
        if self.process_group is None:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.process_group)
        return out

    def broadcast(self, value: T) -> T:
        """The first rank's value. For small Python objects, never for tensors."""
        if self.process_group is None:
            return value
        out: list[Any] = [value]
        dist.broadcast_object_list(out, group=self.process_group, group_src=0)
        return out[0]

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Sums over the ranks, in double precision.

        Ranks that meet here from different parts of the platform end with a TrainingError, not with wrong sums.
        """
        if self.process_group is None:
            return list(values)
        origin = _origin(sys._getframe(1))
        tensor = torch.tensor([*values, origin], dtype=torch.float64)  # on the CPU: no wait for the GPU
        dist.all_reduce(tensor, group=self.process_group)
        *sums, origins = tensor.tolist()
        if origins != origin * self.size:
            watchdog.mispaired(self.process_group)
        return sums

    def barrier(self) -> None:
        if self.process_group is not None:
            self.all_gather(None)


def _origin(caller: FrameType) -> int:
    """A number for the platform's function that calls; 0 for plugins, which may branch on the rank around a call."""
    name = caller.f_globals.get("__name__", "")
    return zlib.crc32(f"{name}.{caller.f_code.co_qualname}".encode()) if name.startswith("crosstrain.") else 0


def world() -> tuple[int, int]:
    """(local rank, world size) as the launcher put them into the environment."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def choose_device(choice: str, local_rank: int) -> torch.device:
    """This rank's device for `run.device`; ConfigError for cuda where there is none."""
    if choice == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device: cuda was asked for, but torch sees no GPU; use auto or cpu")
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())  # srun may show each task its own GPU alone
    torch.cuda.set_device(device)
    return device
