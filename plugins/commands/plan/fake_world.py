"""Ranks that do not exist: a fake process group, and ranks as symbols, to find those that decide everything alike.

A program reads its rank from torch.distributed. Here it reads a symbol, which computes with the numbers of all ranks at
once. Where Python decides by it (a comparison, an index, a key), ranks for which the decision is another one are no
longer alike; those that are left run the same code. torch's own modules get plain numbers: DDP and FSDP run one program
on all ranks of a group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup, distributed_c10d
from torch.utils._pytree import tree_leaves, tree_map

from crosstrain import has_values

_SCALAR = ("add", "sub", "mul", "radd", "rsub", "rmul", "iadd", "isub", "imul", "lt", "le", "gt", "ge", "eq", "ne")


class World:
    """The ranks of a fake process group, seen by one of them.

    alike: bool [ranks], those that have decided as this one. families: disjoint groups that were made one after the
    other, such as the tensor-parallel groups of a mesh. family_of: a group's name -> its family.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.alike = rank, np.ones(size, bool)
        self.families = {"world": [list(range(size))]}
        self.family_of: dict[str, str] = {distributed_c10d._get_default_group().group_name: "world"}

    def decide(self, values: np.ndarray) -> Any:
        """This rank's value; ranks with another one are not alike."""
        self.alike &= values == values[self.rank]
        return values[self.rank].item()

    def rank_in(self, group: ProcessGroup | None = None) -> SymbolicRank:
        """Each rank's number in its group of the family; ranks without a group of this size are not alike."""
        groups = self.families[self.family_of[group.group_name] if group else "world"]
        size = next(len(ranks) for ranks in groups if self.rank in ranks)
        numbers = np.full(len(self.alike), -1)
        for ranks in groups:
            numbers[ranks] = range(size) if len(ranks) == size else -1
        self.decide(numbers >= 0)
        return SymbolicRank(self, numbers)

    def note(self, group: Any, ranks: list[int], description: str | None) -> None:
        """Note a new group, of which this rank need not be a member."""
        name, groups = next(reversed(self.families.items()))
        if not {rank for others in groups for rank in others}.isdisjoint(ranks):
            name = (description or "").removeprefix("mesh_")
            name = name if name and name not in self.families else f"group {len(self.families)}"
        self.families.setdefault(name, []).append(ranks)
        if isinstance(group, ProcessGroup):
            self.family_of[group.group_name] = name


class SymbolicRank(np.lib.mixins.NDArrayOperatorsMixin):
    """A number of each rank, `values` [ranks]. Messages and seeds show this rank's."""

    def __init__(self, world: World, values: np.ndarray) -> None:
        self.world, self.values = world, values

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> Any:
        if any(isinstance(x, Tensor) for x in inputs):
            return getattr(torch, ufunc.__name__)(*inputs)
        out = ufunc(*(x.values if isinstance(x, SymbolicRank) else x for x in inputs))
        each = out if isinstance(out, tuple) else (out,)  # of divmod
        results = [self.world.decide(v) if v.dtype == bool else SymbolicRank(self.world, v) for v in each]
        return tuple(results) if isinstance(out, tuple) else results[0]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with this rank's number: a decision unless it changes nothing but values, which are not there."""
        name, real = func.__name__.strip("_"), any(isinstance(x, Tensor) and has_values(x) for x in tree_leaves(args))
        free = name in _SCALAR or (name == "narrow" and not isinstance(args[-1], cls))  # where it starts

        def own(x: Any) -> Any:
            return x if not isinstance(x, cls) else x.values[x.world.rank].item() if free and not real else int(x)

        return func(*tree_map(own, args), **tree_map(own, kwargs or {}))

    def __index__(self) -> int:
        return self.world.decide(self.values)

    __int__ = __float__ = __index__

    def __bool__(self) -> bool:
        return self.world.decide(self.values != 0)

    def __hash__(self) -> int:
        return hash(int(self))

    def __repr__(self) -> str:
        return str(self.values[self.world.rank])


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """A fake process group of `world_size` ranks, this one `rank`; exchanges do nothing."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the import registers the backend

    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # its results name meshes, of which the next world has equal ones


def grouped_mm(rows: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
    """Replacement of torch's, which without values takes bf16 alone: all rows [n, in] times one of `weights`.

    Shapes, memory and FLOPs are those of groups of rows, each times its own weight [in, out].
    """
    with torch.autocast(rows.device.type, enabled=False):
        return rows @ weights[0]


@contextmanager
def symbolic_ranks(world: World) -> Iterator[None]:
    """Have torch.distributed give symbols to code outside of torch, and note the groups that are made."""

    def told(owner: Any, name: str, symbol: Callable[..., Any] | None) -> Any:
        plain = getattr(owner, name)

        def tell(*args: Any, **kwargs: Any) -> Any:
            out, caller = plain(*args, **kwargs), sys._getframe(1)
            if caller.f_globals.get("__name__", "").startswith("torch.") or name not in caller.f_code.co_names:
                return out  # the latter for torch's C++
            if symbol is None:
                world.decide(np.arange(len(world.alike)))  # of all ranks' numbers; nobody else is alike
            return out if symbol is None or out in (None, -1) else symbol(*args, **kwargs)

        return patch.object(owner, name, tell)

    make = distributed_c10d._new_group_with_tag

    def noted(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        group = make(ranks, *args, **kwargs)
        world.note(group, sorted(ranks or world.families["world"][0]), kwargs.get("group_desc"))
        return group

    with ExitStack() as stack:
        stack.enter_context(patch.object(distributed_c10d, "_new_group_with_tag", noted))
        for owner, name, symbol in (
            (dist, "get_rank", world.rank_in), (dist, "get_process_group_ranks", None), (dist, "get_global_rank", None),
            (ProcessGroup, "rank", world.rank_in), (DeviceMesh, "get_coordinate", None),
            (DeviceMesh, "get_rank", lambda mesh: world.rank_in()),
            (DeviceMesh, "get_local_rank", lambda mesh, mesh_dim=None: world.rank_in(mesh.get_group(mesh_dim))),
        ):  # fmt: skip
            stack.enter_context(told(owner, name, symbol))
        yield
    for family in world.families.values():  # code may have asked if this rank got a group
        world.decide(np.isin(np.arange(len(world.alike)), np.concatenate(family)))
