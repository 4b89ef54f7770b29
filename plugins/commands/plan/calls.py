"""Recognize collective calls in torch's dispatcher, and count the bytes that they send."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from crosstrain import all_reduced, scattered

_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "gather", "scatter",
          "reduce", "send", "recv")  # fmt: skip


def kind_of(func: Any) -> str | None:
    """Return the kind of a dispatched collective or point-to-point call, or None for any other operation."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func._schema.name.partition("::")[2].replace("_", "")
    return next((kind for kind in _KINDS if name.startswith(kind.replace("_", ""))), None)


def sent_by(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes that this rank sends in a dispatched operation, assuming ring algorithms."""
    kind = kind_of(func)
    if kind is None or kind == "recv":
        return 0
    sides = [[leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)] for side in (*args, out)]
    most = max(sum(tensor.numel() * tensor.element_size() for tensor in side) for side in sides)
    if kind == "send":
        return most
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    group = (
        dist.ProcessGroup.unbox(given["process_group"])
        if "process_group" in given
        else dist.distributed_c10d._resolve_process_group(given["group_name"])
    )
    return (all_reduced if kind == "all_reduce" else scattered)(most, group.size())
