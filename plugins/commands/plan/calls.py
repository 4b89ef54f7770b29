"""Record collective calls through torch's dispatcher."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crosstrain.engine.footprint import all_reduced, scattered

_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "gather", "scatter",
          "reduce", "send", "recv")  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A collective or point-to-point call of one rank."""

    kind: str
    ranks: int  # size of the group
    dtype: str  # dtype of the largest tensor
    sent: int  # bytes that this rank sends, with ring algorithms


def call_of(func: Any, args: tuple[Any, ...], out: Any) -> Call | None:
    """Return the collective call of a dispatched operation, or None for any other operation."""
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
        kind, group.size(), str(largest.dtype).removeprefix("torch."), sent.get(kind, scattered(most, group.size()))
    )


class Recorder(TorchDispatchMode):
    """Records the collective calls of this process in `calls`, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # torch then dispatches the DTensor's operations on plain tensors here
        out = func(*args, **(kwargs or {}))
        if (call := call_of(func, args, out)) is not None:
            self.calls.append(call)
        return out
