"""Base class of callbacks that track a validation metric."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from crosstrain import Callback, ConfigError, RunOptions


@dataclass
class Followed:
    """Options of a `Follower`."""

    metric: str = "val_loss"  # name of the metric in metrics.jsonl
    mode: Literal["min", "max"] = "min"  # min: lower is better; max: higher is better


class Follower(Callback):
    """A callback that tracks the validation metric named in its options."""

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        if run.eval_interval is None:
            raise ConfigError(f"run.callbacks: {options.metric} needs validations; set run.eval_interval")
        known = [f"val_{name}" for name in ("loss", "perplexity", *(metric.name for metric in run.metrics))]
        # Models and objectives can add metrics, so an unknown val_ name is an error only if it resembles a known one.
        near = get_close_matches(options.metric, known, 1, 0.87)
        if options.metric not in known and (near or not options.metric.startswith("val_")):
            raise ConfigError(
                f"run.callbacks: validation has no metric {options.metric}; known: {', '.join(near or known)}"
            )

    def cost(self, metrics: Mapping[str, float]) -> float:
        """Return the metric, negated if higher is better."""
        if self.options.metric not in metrics:
            raise ConfigError(f"validation has no metric {self.options.metric}; known: {', '.join(metrics)}")
        return metrics[self.options.metric] * (1 if self.options.mode == "min" else -1)
