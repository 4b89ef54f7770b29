"""Callbacks that follow a number of validation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from crosstrain import Callback, ConfigError, NonNegativeFloat, PositiveInt, RunOptions, registry


@dataclass
class _Followed:
    metric: str = "val_loss"  # as metrics.jsonl calls it
    mode: Literal["min", "max"] = "min"  # which values are better


class _Follower(Callback):
    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        if run.eval_interval is None:
            raise ConfigError(f"run.callbacks: there is no {options.metric} without validations; set run.eval_interval")
        known = [f"val_{name}" for name in ("loss", "perplexity", *(metric.name for metric in run.metrics))]
        # Models and objectives record numbers of other names; this near they are the same name, misspelt.
        near = get_close_matches(options.metric, known, 1, 0.87)
        if options.metric not in known and (near or not options.metric.startswith("val_")):
            raise ConfigError(f"run.callbacks: validation gives no {options.metric}, but {', '.join(near or known)}")

    def cost(self, metrics: Mapping[str, float]) -> float:
        """The number, negated where higher is better."""
        if self.options.metric not in metrics:
            raise ConfigError(f"validation gives no {self.options.metric}, but {', '.join(metrics)}")
        return metrics[self.options.metric] * (1 if self.options.mode == "min" else -1)


@registry.register_callback("early_stopping")
class EarlyStopping(_Follower):
    """Ends training when a number of validation has not improved for some validations in a row."""

    @dataclass
    class Options(_Followed):
        patience: PositiveInt = 5  # validations in a row without an improvement
        min_delta: NonNegativeFloat = 0.0  # by which a value must be better

    def __init__(self, options: Options, trainer: Any) -> None:
        super().__init__(options, trainer)
        self.state = {"best": None, "bad": 0}  # cost; validations since

    def on_validation(self, metrics: Mapping[str, float]) -> None:
        cost, best = self.cost(metrics), self.state["best"]
        if math.isfinite(cost) and (best is None or cost < best - self.options.min_delta):
            self.state = {"best": cost, "bad": 0}
            return
        self.state["bad"] += 1
        if self.state["bad"] >= self.options.patience:
            self.trainer.end(f"{self.options.metric} has not improved in {self.state['bad']} validations")


@registry.register_callback("best_checkpoints")
class BestCheckpoints(_Follower):
    """Saves and keeps the best checkpoints by a number of validation; `checkpoints/best_<metric>` names the best."""

    @dataclass
    class Options(_Followed):
        count: PositiveInt = 3  # checkpoints to keep

    def __init__(self, options: Options, trainer: Any) -> None:
        super().__init__(options, trainer)
        self.state = {"best": []}  # [cost, step], the best first

    def on_validation(self, metrics: Mapping[str, float]) -> None:
        cost, step = self.cost(metrics), self.trainer.state.step
        if math.isfinite(cost):
            self.state["best"] = sorted([*self.state["best"], [cost, step]])[: self.options.count]
        if step in self.keep():
            is_best = self.state["best"][0][1] == step
            self.trainer.save_as(f"best_{self.options.metric.replace('/', '_')}" if is_best else "latest")

    def keep(self) -> set[int]:
        return {step for _, step in self.state["best"]}
