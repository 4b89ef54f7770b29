"""Callbacks that track a validation metric."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from crosstrain import Callback, ConfigError, NonNegativeFloat, PositiveInt, RunOptions, registry


@dataclass
class _Followed:
    metric: str = "val_loss"  # name of the metric in metrics.jsonl
    mode: Literal["min", "max"] = "min"  # min: lower is better; max: higher is better


class _Follower(Callback):
    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        if run.eval_interval is None:
            raise ConfigError(f"run.callbacks: there is no {options.metric} without validations; set run.eval_interval")
        known = [f"val_{name}" for name in ("loss", "perplexity", *(metric.name for metric in run.metrics))]
        # Models and objectives record other metrics, so an unknown val_ name is an error only if close to a known one.
        near = get_close_matches(options.metric, known, 1, 0.87)
        if options.metric not in known and (near or not options.metric.startswith("val_")):
            raise ConfigError(f"run.callbacks: validation gives no {options.metric}, but {', '.join(near or known)}")

    def cost(self, metrics: Mapping[str, float]) -> float:
        """Return the metric, negated if higher is better."""
        if self.options.metric not in metrics:
            raise ConfigError(f"validation gives no {self.options.metric}, but {', '.join(metrics)}")
        return metrics[self.options.metric] * (1 if self.options.mode == "min" else -1)


@registry.register_callback("early_stopping")
class EarlyStopping(_Follower):
    """Ends training when a validation metric has not improved for some validations in a row."""

    @dataclass
    class Options(_Followed):
        patience: PositiveInt = 5  # validations in a row without an improvement
        min_delta: NonNegativeFloat = 0.0  # smaller improvements do not count

    def __init__(self, options: Options, trainer: Any) -> None:
        super().__init__(options, trainer)
        self.state = {"best": None, "bad": 0}  # best cost; validations since then

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
    """Saves and keeps the best checkpoints by a validation metric; `checkpoints/best_<metric>` points to the best."""

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
