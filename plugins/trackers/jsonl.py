"""metrics.jsonl, for programs; resuming and `crosstrain report` rely on it."""

from crosstrain import TrackedRun, Tracker, registry
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.monitor import metrics
from crosstrain.utils.files import append


@registry.register_tracker("jsonl")
class JsonlTracker(Tracker):
    """metrics.jsonl: one JSON object per logged step, there when the step is done; no step stands twice."""

    def __init__(self, options: Tracker.Options, run: TrackedRun) -> None:
        super().__init__(options, run)
        self._path = RunFolder(run.folder).metrics
        metrics.cut_back(self._path, run.resumed_step)

    def log(self, row: metrics.Row) -> None:
        append(self._path, metrics.line(row))

    def place(self) -> str:
        return str(self._path)
