"""Gradient noise scale: the batch size up to which more samples per step help."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Interval
from torch import Tensor

from crosstrain import Box, Callback, Step, registry
from crosstrain.checkpoint.checkpointer import assign, holdings


@registry.register_callback("gradient_noise_scale")
class GradientNoiseScale(Callback):
    """Logs the simple noise scale tr(S) / |G|^2, in samples (McCandlish et al., 2018, appendix A.1).

    The paper's two unbiased estimates need the gradients of a small and a large batch at the same weights. This
    callback takes the gradients g1 and g2 of two consecutive steps of B samples for small batches, and their mean for a
    batch of 2 B. This approximation ignores the update between the steps. The estimates are then g1 . g2 for |G|^2 and
    B |g1 - g2|^2 / 2 for tr(S); the noise scale is the ratio of their moving averages. Each rank keeps a copy of its
    share of the gradients. A resumed run misses one pair of steps.
    """

    @dataclass
    class Options:
        smoothing: Annotated[float, Interval(ge=0, lt=1)] = 0.95  # weight of the old averages at each step

    def __init__(self, options: Options, trainer: Any) -> None:
        super().__init__(options, trainer)
        self.state = {"square": 0.0, "noise": 0.0}  # moving averages; the bias of their start at 0 cancels
        self.last: dict[tuple[str, Box], Tensor] = {}
        world = trainer.runner.world
        parameters = [s for s in trainer.runner.held.shards() if s.kind == "param"]
        writers = assign(world.all_gather(list(holdings(parameters))))
        self.mine = {(h.name, h.box) for h, rank in writers.items() if rank == world.rank}  # each element counts once

    def after_backward(self, batch: Step, loss: float) -> None:
        runner, last = self.trainer.runner, self.last
        pieces = (((shard.name, piece.box), piece.data) for shard in runner.held.gradients() for piece in shard.pieces)
        self.last = {key: data.float() / runner.gradient_scale for key, data in pieces if key in self.mine}
        pairs = [(last[key], now) for key, now in self.last.items() if key in last]
        product = sum((a.double() * b).sum().item() for a, b in pairs)
        change = sum((a.double() - b).square().sum().item() for a, b in pairs)
        product, change, count = runner.world.all_reduce_sum(product, change, len(pairs))
        if not count or not math.isfinite(product + change):  # the first step, or a step that will be skipped
            return
        stays = self.options.smoothing
        for name, value in (("square", product), ("noise", self.trainer.plan.global_batch * change / 2)):
            self.state[name] = stays * self.state[name] + (1 - stays) * value
        if self.state["square"] > 0:
            self.scalars["noise_scale"] = self.state["noise"] / self.state["square"]
