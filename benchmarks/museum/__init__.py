"""A museum of silent training bugs: each exhibit is a runner with one publicly reported bug.

An exhibit's docstring describes the bug and links to its thread. `EXPECTED` is the right answer of a tool that compares
the runner with `ddp`. Files with the prefix `healthy_` contain runners that get the same results in a different way: a
tool must not report a problem with them. `python benchmarks/museum` runs `crosstrain compare` on all of them.
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
    """The right answer about an exhibit, and the project that shows the bug."""

    phase: Phase | None = None  # first phase with wrong results; None: no results are wrong
    cause: str = ""  # regular expression that the cause must match, ignoring case
    parameter: str | None = None  # pattern of the canonical names of wrong tensors; None: (nearly) all of them, or none
    # `still`: gpt2 without dropout; `muon`: `still` with Muon
    project: Literal["gpt2", "still", "muon", "qwen", "experts", "chat", "packed", "adapter", "policy"] = "gpt2"
    steps: int = 3
    base: str = "ddp"  # the runner that the bug is added to
    options: dict[str, Any] = field(default_factory=dict)  # options of `base`


def matching(model: Model, pattern: str) -> dict[str, nn.Parameter]:
    """Return the parameters of a model with canonical names that match a pattern."""
    parameters = model.weights.parameters()
    return {name: parameters[name] for name in fnmatch.filter(parameters, pattern)}


def resumed(runner: Runner) -> bool:
    """Return True if the optimizer state contains earlier steps."""
    states = runner.optimizer.state.values() if runner.optimizer is not None else []
    return any(float(state["step"]) > 0 for state in states)


class OtherLabels:
    """A mixin of runners: the model gets `labels(batch)` instead of the labels in the batch."""

    def prepare(self, model: Model, make_optimizer: Any) -> None:
        super().prepare(model, make_optimizer)
        model.num_targets = lambda batch: Model.num_targets({"labels": self.labels(batch)})

    def compute_loss(self, batch: Any) -> Any:
        return super().compute_loss(batch | {"labels": self.labels(batch)})

    def evaluate(self, batch: Any, *mode: Any) -> Any:
        return super().evaluate(batch | {"labels": self.labels(batch)}, *mode)


class OtherSamples:
    """A mixin of runners: `change(batch)` changes what the policy sampled, before it is learned."""

    def prepare(self, model: Model, make_optimizer: Any) -> None:
        super().prepare(model, make_optimizer)
        begin_step = self.objective.begin_step

        def begin(step: Any, policy: Any) -> Any:
            begun = begin_step(step, policy)
            for micro in begun:
                self.change(micro.data)
            return begun

        self.objective.begin_step = begin
