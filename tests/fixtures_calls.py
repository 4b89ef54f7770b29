"""Records the collective calls of a process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crosstrain_plugins.builtin.commands.plan.calls import kind_of, sent_by
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Call:
    kind: str
    dtype: str  # of the largest tensor
    sent: int  # bytes that this rank sends, with ring algorithms


class Recorder(TorchDispatchMode):
    """Records calls in `calls`, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # torch then dispatches the DTensor's operations on plain tensors here
        out = func(*args, **(kwargs or {}))
        if kind := kind_of(func):
            largest = max((leaf for leaf in tree_leaves([args, out]) if isinstance(leaf, Tensor)), key=Tensor.numel)
            self.calls.append(Call(kind, str(largest.dtype).removeprefix("torch."), sent_by(func, args, out)))
        return out
