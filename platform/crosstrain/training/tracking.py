"""The hook that logs the metrics of a step to the run's trackers."""

from typing import Any

from crosstrain.monitor.metrics import StepMetrics
from crosstrain.monitor.tracker import TrackedRun, Trackers
from crosstrain.training.callback import Callback


class Tracking(Callback):
    """Logs `trainer.row` to the trackers on rank 0, after other hooks have filled it."""

    def __init__(self, options: Any, trainer: Any) -> None:
        super().__init__(options, trainer)
        self.trackers: Trackers | None = None
        self._step, self._folder = trainer.state.step, trainer.folder_number

    def on_start(self) -> None:
        self._start(self.trainer.state.step)

    def after_step(self, metrics: StepMetrics) -> None:
        self._track()

    def before_end(self) -> None:
        self._track()

    def close(self) -> None:
        if self.trackers is not None:
            state = self.trainer.state
            self.trackers.close(finished=bool(state.ended_with) or self._step == self.trainer.max_iters)

    def places(self) -> list[tuple[str, str]]:
        return [] if self.trackers is None else self.trackers.places()

    def _start(self, step: int) -> None:
        """Start the trackers in the run's current folder."""
        trainer = self.trainer
        if self.trackers is not None:
            self.trackers.close(finished=False)
        self._step, self._folder = step, trainer.folder_number
        run = TrackedRun(trainer.folder.path, trainer.config.plain, step)
        self.trackers = Trackers(trainer.run.trackers if trainer.is_main else [], run)

    def _track(self) -> None:
        trainer = self.trainer
        if not trainer.row:
            return
        trainer.keep_folder()
        if self.trackers is None or self._folder != trainer.folder_number:  # the folder was recreated
            self._start(self._step)
        assert self.trackers is not None
        self._step = trainer.state.step
        self.trackers.log({"step": self._step} | trainer.row)
        trainer.row = {}
