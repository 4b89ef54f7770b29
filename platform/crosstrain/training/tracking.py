"""The hook that logs the metrics of a step to the run's trackers."""

from collections.abc import Sequence

from crosstrain.monitor.metrics import StepMetrics
from crosstrain.monitor.tracker import IsolatedTracker, TrackedRun
from crosstrain.training.callback import Callback


class Tracking(Callback):
    """Logs `trainer.row` to the trackers on rank 0, after other hooks have filled the row."""

    _trackers: Sequence[IsolatedTracker] = ()
    _step = 0  # the last step with a row

    def on_start(self) -> None:
        trainer = self.trainer
        self._step = trainer.state.step
        if trainer.is_main:
            run = TrackedRun(trainer.folder.path, trainer.config.plain, trainer.state.step)
            self._trackers = [IsolatedTracker(component, run) for component in trainer.run.trackers]

    def after_step(self, metrics: StepMetrics) -> None:
        self.before_end()

    def before_end(self) -> None:
        """Send the row to the trackers, if a hook has filled it since the last row."""
        trainer = self.trainer
        if trainer.row:
            trainer.folder.check_kept()
            self._step = trainer.state.step
            row, trainer.row = {"step": self._step} | trainer.row, {}
            for tracker in self._trackers:
                tracker.call(lambda t: t.log(row))

    def close(self) -> None:
        finished = bool(self.trainer.state.ended_with) or self._step == self.trainer.max_iters
        for tracker in self._trackers:
            tracker.call(lambda t: t.close(finished))
        for tracker in self._trackers:
            tracker.join()

    def places(self) -> list[tuple[str, str]]:
        return [(tracker.name, tracker.place) for tracker in self._trackers if tracker.place]
