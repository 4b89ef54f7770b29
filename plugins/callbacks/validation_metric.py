"""The base of callbacks that follow one metric of validation."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from crosstrain import Callback, ConfigError, RunOptions


@dataclass
class Followed:
    """Options of a `Follower`."""

    metric: str = "val_loss"  # as metrics.jsonl calls it
    mode: Literal["min", "max"] = "min"  # which values are better


class Follower(Callback):
    """A callback whose options name a metric of validation and the direction in which it is better."""

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
