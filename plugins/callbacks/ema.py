"""Exponential moving average of the weights."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Interval

from crosstrain import Callback, Piece, Shard, StepMetrics, registry


@registry.register_callback("ema")
class EMA(Callback):
    """Exponential moving average of the trained weights, for `evaluate` and `export` with `--weights ema`."""

    @dataclass
    class Options:
        decay: Annotated[float, Interval(ge=0, lt=1)] = 0.999  # weight of the old average at each step

    def __init__(self, options: Options, trainer: Any) -> None:
        super().__init__(options, trainer)
        self.average = [
            replace(shard, kind="ema", pieces=[Piece(p.box, p.data.clone()) for p in shard.pieces])
            for shard in self.weights()
        ]

    def weights(self) -> list[Shard]:
        """Return this rank's shards of the trained parameters."""
        runner = self.trainer.runner
        trained = {name for name, p in runner.model.weights.parameters().items() if p.requires_grad}
        return [s for s in runner.held.shards() if s.kind == "param" and s.name in trained]

    @torch.no_grad()
    def after_step(self, metrics: StepMetrics) -> None:
        ours, theirs = ([p.data for s in shards for p in s.pieces] for shards in (self.average, self.weights()))
        for average, weight in zip(ours, theirs, strict=True):
            average.lerp_(weight, 1 - self.options.decay)

    def shards(self) -> list[Shard]:
        return self.average
