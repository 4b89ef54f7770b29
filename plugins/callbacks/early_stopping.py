"""Stop training when a validation metric no longer improves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosstrain import NonNegativeFloat, PositiveInt, registry

from .validation_metric import Followed, Follower


@registry.register_callback("early_stopping")
class EarlyStopping(Follower):
    """Ends training when a validation metric has not improved in `patience` validations in a row."""

    @dataclass
    class Options(Followed):
        patience: PositiveInt = 5  # training ends after this many consecutive validations without an improvement
        min_delta: NonNegativeFloat = 0.0  # minimum change that counts as an improvement

    def __init__(self, options: Options, trainer: Any) -> None:
        super().__init__(options, trainer)
        self.state = {"best": None, "bad": 0}  # best: lowest cost so far; bad: validations since then

    def on_validation(self, metrics: Mapping[str, float]) -> None:
        cost, best = self.cost(metrics), self.state["best"]
        if math.isfinite(cost) and (best is None or cost < best - self.options.min_delta):
            self.state = {"best": cost, "bad": 0}
        else:
            self.state["bad"] += 1
        if self.state["bad"] >= self.options.patience:
            self.trainer.end(f"{self.options.metric} has not improved in {self.state['bad']} validations")
