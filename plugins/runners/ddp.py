"""Data parallelism: every rank holds the full model and trains on its own samples.

A single process trains without communication.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
from annotated_types import Interval
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from crosstrain import (
    Capabilities,
    ContextOptions,
    Layout,
    MakeOptimizer,
    Model,
    PlanContext,
    Runner,
    Sizes,
    registry,
)
from crosstrain.distributed.watchdog import watchdog
from crosstrain.engine.footprint import data_parallel

from .used_parameters import UsedParameters


@registry.register_runner("ddp")
class DDPRunner(Runner):
    """torch's DistributedDataParallel: gradients are averaged during the backward."""

    @dataclass
    class Options(ContextOptions):
        """Options of `run.runner` for ddp."""

        # size of gradient buckets in MiB
        bucket_cap_mb: Annotated[int, Interval(ge=1, le=2**20)] = 25
        find_unused_parameters: bool = False  # True: allow steps that do not use every parameter

    capabilities: ClassVar = Capabilities(
        bitwise="crosstrain_plugins.builtin.runners.bitwise.ddp:BitwiseDDP", forms_teams=True, rejoins=True
    )
    _bucket_ready: float | None = None
    _used: UsedParameters | None = None  # None: unused parameters are not detected

    @classmethod
    def layouts(cls, options: Any, at: PlanContext) -> list[Layout]:
        out = data_parallel(at)
        if at.world_size > 1:
            buckets = Sizes.of(at.model).trainable  # buckets stay allocated; accumulation doubles this memory
            out.gradients, out.retained_grad_fraction = buckets * (2 if at.batch.accumulation > 1 else 1), 0.0
        return [out]

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        super().prepare(model, make_optimizer)
        if self.team.size == 1 or make_optimizer is None:
            return
        self.module = DistributedDataParallel(
            model,
            process_group=self.team.process_group,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            bucket_cap_mb=self.options.bucket_cap_mb,
            find_unused_parameters=self.options.find_unused_parameters,
            forward_sync_buffers=False,
            init_sync=False,  # every rank initializes the same weights itself
            gradient_as_bucket_view=True,
        )
        if not self.options.find_unused_parameters:
            self._used = UsedParameters(model)
        # Use a lambda, because torch checks a hook's annotations but cannot resolve postponed annotations.
        self.module.register_comm_hook(None, lambda _, bucket: self._exchange(bucket))

    def _exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average one bucket over the ranks, and record when it was ready."""
        self._bucket_ready = time.perf_counter()
        gradients = bucket.buffer().div_(self.team.size)
        # `value` raises the collective's error; its result is ignored, because a fake process group returns no tensor.
        work = dist.all_reduce(gradients, group=self.team.process_group, async_op=True)
        return work.get_future().then(lambda done: (done.value(), gradients)[1])

    def backward(self, loss: Tensor) -> None:
        self._bucket_ready = None
        if self._used is not None:
            self._used.clear()
        super().backward(loss)
        # On a GPU the hook runs long before the device reaches the bucket, so the hook's time is meaningless.
        if self._bucket_ready is not None and self.device.type == "cpu":
            # After the last bucket is ready, the backward only waits: this is the communication that is not overlapped.
            waited = time.perf_counter() - self._bucket_ready
            self.timers.add("backward", -waited)
            self.timers.add("allreduce", waited)
            watchdog.add_wait(waited)
        if self._used is not None and self.module.require_backward_grad_sync:
            self._used.check(
                "so ranks cannot average gradients; for a model with unused parameters, set run.runner: {name: ddp, "
                "find_unused_parameters: true}"
            )

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last or self.module is self.model else self.module.no_sync()
