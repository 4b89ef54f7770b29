"""Calls of collectives, as torch's dispatcher sees them."""

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from crosstrain.distributed.watchdog.flight_recorder import Location
from crosstrain.engine.footprint import all_reduced, scattered

_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "gather", "scatter",
          "reduce", "send", "recv")  # fmt: skip
_UNEVEN = ("all_to_all", "gather", "scatter", "barrier")  # ranks may have different tensors


@dataclass(frozen=True)
class Call:
    """A rank's call of a collective, or of a message between two ranks. Calls that can meet are equal."""

    kind: str
    group: str  # name of the process group, or of its family
    ranks: int  # in the group
    tensor: str  # type and shape of the largest one; empty where ranks may have different ones
    peer: int | None = None  # the rank in the group that sends, receives or broadcasts
    sent: int = field(default=0, compare=False)  # bytes by this rank, for ring algorithms
    location: Location = field(default=Location("", 0, ""), compare=False)

    def __str__(self) -> str:
        return f"{self.kind} of {self.tensor} ({self.location})"


def call_of(func: Any, args: tuple[Any, ...], out: Any) -> Call | None:
    """The call that an operation of torch's dispatcher is, without its location; None if it is none."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func._schema.name.partition("::")[2].replace("_", "")
    kind = next((kind for kind in _KINDS if name.startswith(kind.replace("_", ""))), None)
    if kind is None:
        return None
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    if "process_group" in given:
        group = dist.ProcessGroup.unbox(given["process_group"])
    else:
        group = dist.distributed_c10d._resolve_process_group(given["group_name"])
    sides = [[leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)] for side in (*args, out)]
    most = max(sum(tensor.numel() * tensor.element_size() for tensor in side) for side in sides)
    largest = max((tensor for side in sides for tensor in side), key=Tensor.numel)
    sent = {"all_reduce": all_reduced(most, group.size()), "send": most, "recv": 0}
    return Call(
        kind, group.group_name, group.size(),
        "" if kind in _UNEVEN else f"{str(largest.dtype).removeprefix('torch.')} {list(largest.shape)}",
        next((given[key] for key in ("src", "dst", "root_rank") if key in given), None),
        sent.get(kind, scattered(most, group.size())),
    )  # fmt: skip
