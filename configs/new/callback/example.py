"""A callback that ends training early."""

from dataclasses import dataclass
from typing import Any

from crosstrain import Callback, PositiveFloat, PositiveInt, StepMetrics, registry


@registry.register_callback("example")
class ExampleCallback(Callback):
    """Ends training when the loss has been below a bound for a number of consecutive steps."""

    @dataclass
    class Options:
        loss: PositiveFloat  # upper bound of the loss
        steps: PositiveInt = 10  # number of consecutive steps

    def __init__(self, options: Options, trainer: Any) -> None:
        super().__init__(options, trainer)
        self.state = {"below": 0}  # consecutive steps so far; saved in checkpoints

    def after_step(self, metrics: StepMetrics) -> None:
        below = metrics.loss is not None and metrics.loss < self.options.loss
        self.state["below"] = self.state["below"] + 1 if below else 0
        self.scalars["steps_below"] = self.state["below"]  # shown in the log, metrics.jsonl and the trackers
        if self.state["below"] >= self.options.steps:
            self.trainer.end(f"the loss has been below {self.options.loss} for {self.options.steps} steps")
