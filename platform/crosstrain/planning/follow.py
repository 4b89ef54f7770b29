"""Follow one training step of every rank, without other ranks and without values, and record its collectives.

The configured runner itself runs, in a fake process group, with tensors that have shapes alone. Ranks that decide
everything alike are followed once (`fake_world`). Of many micro batches as many are followed as are in flight, and
then until two in a row make the same calls: those that are left out make them again.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from crosstrain.config.batch import BatchPlan
from crosstrain.config.load import Config
from crosstrain.distributed.group import Group
from crosstrain.distributed.watchdog import flight_recorder
from crosstrain.distributed.watchdog.flight_recorder import Location
from crosstrain.engine.build import batch_plan, construct_model, make_runner
from crosstrain.engine.optimizer import optimizer_factory
from crosstrain.engine.runner import Runner
from crosstrain.modeling.base import Model
from crosstrain.planning.calls import Call, call_of
from crosstrain.planning.estimate import Project
from crosstrain.planning.fake_world import World, fake_world, grouped_mm, symbolic_ranks
from crosstrain.utils.types import Batch, MicroBatch

_NONE: list[flight_recorder.Call] = []


class Recorder(TorchDispatchMode):
    """Records the calls of this process, `calls`, in order; tensors may have values or not."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its operations on plain tensors come here, too
        out = self.compute(func, args, kwargs or {})
        if (call := call_of(func, args, out)) is not None:
            self.calls.append(replace(call, location=flight_recorder.locate(sys._getframe(1))[0]))
        return out

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def step(self, config: Config, runner: Runner, make: Callable[[], Model], inputs: Batch, count: int) -> None:
        """Record one step of `count` micro batches of `inputs`, with the model that `make` gives, under `runner`."""
        with self:
            model = construct_model(config, runner, make, for_training=True)
            runner.prepare(model, optimizer_factory(config, model))
            self.calls.clear()
            runner.forward_backward([MicroBatch(number, inputs, 1) for number in range(count)], count)
            runner.optimizer_step()


class _Announced(dict[str, Any]):
    """A batch that calls `begun` when it is moved to the device, where its forward begins."""

    def __init__(self, batch: Batch, begun: Callable[[], None]) -> None:
        super().__init__(batch)
        self._begun = begun

    def items(self) -> Any:
        self._begun()
        return super().items()


class _Follower(Recorder):
    """Records the calls of a rank whose tensors have no values; where it reads one, numbers are 1 and flags 0."""

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        fake = args and isinstance(args[0], FakeTensor)
        if fake and func is torch.ops.prim.device.default:
            return args[0].fake_device  # as FakeTensor does, many times faster
        if fake and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 0
        if fake and func in (torch.ops.aten.equal.default, torch.ops.aten.allclose.default):
            return True
        out = func(*args, **kwargs)
        if func is torch.ops.c10d.allreduce_.default and not isinstance(args[0][0], FakeTensor):
            args[0][0].mul_(dist.ProcessGroup.unbox(args[1]).size())  # the others' numbers are the same
        return out


@dataclass(eq=False)
class Program:
    """The calls of a step of `ranks`, of which the first was followed. families: groups, as lists of ranks."""

    ranks: list[int]
    calls: list[Call]
    families: dict[str, list[list[int]]]

    def __post_init__(self) -> None:
        self.end = self.calls[-1].location if self.calls else Location(__file__, 0, "a step")
        self._by_family: dict[tuple[str, str, int | None], list[flight_recorder.Call]] = {}
        for call in self.calls:
            message = call.kind in ("send", "recv")
            operation = "message" if message else call.kind if call.peer is None else f"{call.kind} by {call.peer}"
            seen = flight_recorder.Call(operation, call.tensor, call.location)
            key = call.group, call.kind if message else "", call.peer if message else None
            self._by_family.setdefault(key, []).append(seen)

    def on(self, family: str, kind: str = "", peer: int | None = None) -> list[flight_recorder.Call]:
        """Collectives on this rank's group of a family; with a kind, messages to or from the rank `peer` of it."""
        return self._by_family.get((family, kind, peer), _NONE)

    def peers(self, family: str) -> set[int]:
        """Ranks of this rank's group that it has messages for or from."""
        return {peer for group, _, peer in self._by_family if group == family and peer is not None}


def follow(project: Project, world_size: int) -> list[Program]:
    """The programs of all ranks. Raises what the runner raises."""
    batch, last = batch_plan(project.config, world_size), world_size - 1
    with fake_world(world_size):
        layouts = project.layouts(project.config, world_size, batch)
    count = batch.accumulation
    if all(layout.steady for layout in layouts):
        count = min(math.ceil(max(layout.in_flight for layout in layouts)) + 3, count)
    found, left = list[Program](), list(range(world_size))
    while left:
        program = _follow(project, world_size, left[0], batch, count)
        program.ranks = [rank for rank in program.ranks if rank in left]
        left = [rank for rank in left if rank not in program.ranks]
        found.append(program)
    # torch's own modules know their rank, and the last one's part of a tensor may be smaller.
    known = next(program for program in found if last in program.ranks)
    if known.ranks[0] != last and (program := _follow(project, world_size, last, batch, count)).calls != known.calls:
        known.ranks.remove(last)
        found.append(program)
    return found


def _follow(project: Project, world_size: int, rank: int, batch: BatchPlan, count: int) -> Program:
    """The program of a rank, followed with `count` micro batches, or with all where those do not repeat themselves."""
    config = replace(project.config, run=replace(project.config.run, device="cpu"))
    begins: list[int] = []
    model = copy.deepcopy(project.model)  # here, because buffers, which have values, cannot be copied to fake tensors
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(fake_world(world_size, rank))
        world, calls = World(rank, world_size), _Follower()
        stack.enter_context(symbolic_ranks(world))
        runner = make_runner(config)
        runner.setup()
        for name in ("all_gather", "all_reduce_sum", "broadcast"):  # of Python values, which are there
            stack.enter_context(patch.object(Group, name, unset_fake_temporarily()(getattr(Group, name))))
        stack.enter_context(patch.object(DeviceMesh, "__init__", unset_fake_temporarily()(DeviceMesh.__init__)))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(patch.object(torch.nn.functional, "grouped_mm", grouped_mm))
        state = torch.empty_like(torch.get_rng_state())
        stack.enter_context(patch.object(torch, "get_rng_state", lambda: state))
        stack.enter_context(patch.object(torch, "set_rng_state", lambda _: None))
        inputs = {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in project.batch_of(batch.micro_batch).items()}
        calls.step(config, runner, lambda: model, _Announced(inputs, lambda: begins.append(len(calls.calls))), count)
    made = [replace(call, group=world.family_of[call.group]) for call in calls.calls]
    if count < batch.accumulation:
        if len(begins) != count or (again := made[begins[-2] : begins[-1]]) != made[begins[-3] : begins[-2]]:
            return _follow(project, world_size, rank, batch, batch.accumulation)
        made[begins[-1] : begins[-1]] = again * (batch.accumulation - count)
    return Program([rank, *(np.flatnonzero(world.alike[rank + 1 :]) + rank + 1).tolist()], made, world.families)
