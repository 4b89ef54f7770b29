"""Keep the checkpoints with the best values of a validation metric."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosstrain import PositiveInt, registry

from .validation_metric import Followed, Follower


@registry.register_callback("best_checkpoints")
class BestCheckpoints(Follower):
    """Keeps the checkpoints with the best values of a validation metric; `checkpoints/best_<metric>` is the best."""

    @dataclass
    class Options(Followed):
        count: PositiveInt = 3  # number of checkpoints to keep

    def __init__(self, options: Options, trainer: Any) -> None:
        super().__init__(options, trainer)
        self.state = {"best": []}  # list of [cost, step], the best first

    def on_validation(self, metrics: Mapping[str, float]) -> None:
        cost, step = self.cost(metrics), self.trainer.state.step
        if math.isfinite(cost):
            self.state["best"] = sorted([*self.state["best"], [cost, step]])[: self.options.count]
        if step in self.keep():
            is_best = self.state["best"][0][1] == step
            self.trainer.save_as(f"best_{self.options.metric.replace('/', '_')}" if is_best else "latest")

    def keep(self) -> set[int]:
        return {step for _, step in self.state["best"]}
