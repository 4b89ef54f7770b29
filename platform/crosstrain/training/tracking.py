"""The hook that logs the metrics of a step to the run's trackers."""

from typing import Any

from crosstrain.monitor.metrics import StepMetrics
from crosstrain.monitor.tracker import IsolatedTracker, TrackedRun
from crosstrain.training.callback import Callback


class Tracking(Callback):
    """Logs `trainer.row` to the trackers on rank 0, after other hooks have filled it."""

    def __init__(self, options: Any, trainer: Any) -> None:
        super().__init__(options, trainer)
        self._trackers: list[IsolatedTracker] = []
        self._step = trainer.state.step
        self._folder = -1  # `folder_number` of the trackers' folder; -1: they are not started

    def on_start(self) -> None:
        self._start(self.trainer.state.step)

    def after_step(self, metrics: StepMetrics) -> None:
        self._track()

    def before_end(self) -> None:
        self._track()

    def close(self) -> None:
        self._finish(bool(self.trainer.state.ended_with) or self._step == self.trainer.max_iters)

    def places(self) -> list[tuple[str, str]]:
        return [(tracker.name, tracker.place) for tracker in self._trackers if tracker.place]

    def _start(self, step: int) -> None:
        """Start the trackers in the run's current folder."""
        trainer = self.trainer
        self._finish(finished=False)
        self._step, self._folder = step, trainer.folder_number
        if trainer.is_main:
            run = TrackedRun(trainer.folder.path, trainer.config.plain, step)
            self._trackers = [IsolatedTracker(component, run) for component in trainer.run.trackers]

    def _track(self) -> None:
        trainer = self.trainer
        if not trainer.row:
            return
        trainer.keep_folder()
        if self._folder != trainer.folder_number:  # the folder was recreated
            self._start(self._step)
        self._step = trainer.state.step
        row, trainer.row = {"step": self._step} | trainer.row, {}
        for tracker in self._trackers:
            tracker.call(lambda t: t.log(row))

    def _finish(self, finished: bool) -> None:
        for tracker in self._trackers:
            tracker.call(lambda t: t.close(finished))
        for tracker in self._trackers:
            tracker.join()
