"""A museum of silent training bugs: each exhibit is a runner with one publicly reported bug.

An exhibit's docstring says the bug and links to its thread; `EXPECTED` says what a tool should answer that compares the
runner with `ddp`. Files that begin with `healthy_` hold runners that compute the same in another way: no tool may find
anything wrong with them. `python benchmarks/museum` holds `crosstrain compare` to all of it.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from crosstrain import Model, Runner

Phase = Literal[
    "samples", "forward", "gradients", "norm", "learning rate", "update", "state", "resume", "evaluation", "export"
]


@dataclass(frozen=True)
class Expected:
    """The right answer about an exhibit, and what shows it."""

    phase: Phase | None = None  # the first thing that goes wrong; None: nothing does
    cause: str = ""  # regular expression that a sentence about the cause matches, in any case
    parameter: str | None = None  # pattern of the canonical names of wrong tensors; None: (nearly) all of them, or none
    project: Literal["gpt2", "still", "qwen", "chat", "packed", "adapter"] = "gpt2"  # `still`: gpt2 without dropout
    steps: int = 3
    base: str = "ddp"  # the runner that it is but for the bug
    options: dict[str, Any] = field(default_factory=dict)  # of `base`


def matching(model: Model, pattern: str) -> dict[str, nn.Parameter]:
    """The model's parameters whose canonical names match a pattern."""
    parameters = model.weights.parameters()
    return {name: parameters[name] for name in fnmatch.filter(parameters, pattern)}


def resumed(runner: Runner) -> bool:
    """True where the optimizer's state is that of a run under way."""
    states = runner.optimizer.state.values() if runner.optimizer is not None else []
    return any(float(state["step"]) > 0 for state in states)


class OtherLabels:
    """A runner, by inheritance before another one, whose model gets `labels(batch)` in place of the batch's."""

    def prepare(self, model: Model, make_optimizer: Any) -> None:
        super().prepare(model, make_optimizer)
        model.num_targets = lambda batch: Model.num_targets({"labels": self.labels(batch)})

    def compute_loss(self, batch: Any) -> Any:
        return super().compute_loss(batch | {"labels": self.labels(batch)})

    def evaluate(self, batch: Any, *mode: Any) -> Any:
        return super().evaluate(batch | {"labels": self.labels(batch)}, *mode)
