"""Bitwise reproducible data parallelism: gradients are summed after the last micro batch of a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from crosstrain import MakeOptimizer, Model, Runner

from ..ddp import DDPRunner
from .backend import BACKENDS
from .base import Bitwise, unfused
from .gradients import WholeGradients


class BitwiseDDP(Bitwise, DDPRunner):
    """DDP without torch's wrapper, because it adds the gradients of a rank's micro batches one after the other."""

    capabilities: ClassVar = replace(
        DDPRunner.capabilities, consecutive_micro_batches=True, backends=BACKENDS, draws_parts=True
    )
    gradients: WholeGradients

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        Runner.prepare(self, model, unfused(make_optimizer))
        self.slice(model)
        self.gradients = WholeGradients([p for p in model.parameters() if p.requires_grad], self.dp, self.context)

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        yield
        with self.timers("allreduce"):
            self.gradients.take()
            if last:
                self.gradients.finish()

    def backward(self, loss: Tensor) -> None:
        Runner.backward(self, loss)
