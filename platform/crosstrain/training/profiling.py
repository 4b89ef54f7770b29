"""The hook that profiles the steps of `run.profile`."""

from __future__ import annotations

from typing import Any

from crosstrain.monitor.metrics import StepMetrics
from crosstrain.monitor.profiler import Profiler
from crosstrain.training.callback import Callback


class Profiling(Callback):
    """Profiles the steps of `run.profile` on this rank, from data loading to the update."""

    def __init__(self, options: Any, trainer: Any) -> None:
        super().__init__(options, trainer)
        rank, device = trainer.runner.world.rank, trainer.runner.device
        self._profiler = Profiler(trainer.run.profile, trainer.folder.profile, rank, device)

    def before_batch(self) -> None:
        self._profiler.begin(self.trainer.state.step + 1)

    def after_step(self, metrics: StepMetrics) -> None:
        with self.trainer.throughput.paused():
            self._profiler.end(metrics.step)

    def before_end(self) -> None:
        self._profiler.write()  # in case training ends inside the window
