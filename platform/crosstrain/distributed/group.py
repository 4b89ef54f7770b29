"""Groups of ranks with collectives on Python values; in a group of one process, a collective is local."""

import os
import zlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from crosstrain.utils.errors import CheckpointError, ConfigError, TrainingError, UserError

T = TypeVar("T")

# The watchdog sets this function. A `Group` calls it when ranks enter different collectives, before raising the error.
desync_handler: Callable[[dist.ProcessGroup], None] | None = None


class Group:
    """A group of ranks. A group of one process has no torch process group."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.rank = dist.get_rank(process_group) if process_group else 0
        self.size = dist.get_world_size(process_group) if process_group else 1
        self.process_group = process_group if self.size > 1 else None
        self.handle = process_group  # also of a group of one rank, for engines that need one

    def twin(self) -> "Group":
        """Return a gloo group of all ranks, for small messages on the host. Collective."""
        return Group(cast(dist.ProcessGroup, dist.new_group(backend="gloo")) if self.process_group else None)

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order; for small Python objects, not for tensors."""
        if self.process_group is None:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.process_group)
        return out

    def broadcast(self, value: T) -> T:
        """Return the first rank's value; for small Python objects, not for tensors."""
        if self.process_group is None:
            return value
        out: list[Any] = [value]
        dist.broadcast_object_list(out, group=self.process_group, group_src=0)
        return out[0]

    def all_reduce_sum(self, *values: float, tag: str = "") -> list[float]:
        """Return the sums over the ranks, in double precision.

        `tag` names the summed values, such as "loss". Raises TrainingError if the ranks pass different tags, because
        the sums would be wrong.
        """
        if self.process_group is None:
            return list(values)
        number = zlib.crc32(tag.encode())
        tensor = torch.tensor([*values, number], dtype=torch.float64)  # on the CPU, to avoid a sync with the GPU
        dist.all_reduce(tensor, group=self.process_group)
        *sums, numbers = tensor.tolist()
        if numbers != number * self.size:
            if desync_handler is not None:
                desync_handler(self.process_group)
            raise TrainingError(
                f"the ranks called different collectives, one of them the sum of {tag or 'numbers without a tag'}; "
                f"every rank must call the same collectives"
            )
        return sums

    def together(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return the results of all ranks. Collective.

        If some ranks fail with a UserError or an OSError, one of the errors is raised on every rank. A CheckpointError
        is raised only if all errors are CheckpointErrors, because an unreadable bucket or a full disk does not mean
        that the checkpoint is damaged.
        """
        result = problem = None
        try:
            result = action()
        except (UserError, OSError) as error:
            problem = error
        results, problems = zip(*self.all_gather((result, problem)), strict=True)
        if found := [error for error in problems if error is not None]:
            raise min(found, key=lambda error: isinstance(error, CheckpointError))
        return list(results)

    def barrier(self) -> None:
        self.all_gather(None)


def world() -> tuple[int, int]:
    """Return (local rank, world size) from the launcher's environment variables."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def choose_device(choice: str, local_rank: int) -> torch.device:
    """Return this rank's device for `run.device`. Raises ConfigError if cuda is requested and there is no GPU."""
    if choice == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device: cuda needs a GPU, but torch finds none; use auto or cpu")
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())  # srun may show each task only one GPU
    torch.cuda.set_device(device)
    return device
