"""metrics.jsonl, for programs; resuming and `crosstrain report` rely on it."""

from crosstrain.monitor import metrics
from crosstrain.monitor.tracker import TrackedRun, Tracker
from crosstrain.registry import registry
from crosstrain.run_folder import RunFolder


@registry.register_tracker("jsonl")
class JsonlTracker(Tracker):
    """metrics.jsonl: one JSON object per logged step, there when the step is done; no step stands twice."""

    def __init__(self, options: Tracker.Options, run: TrackedRun) -> None:
        super().__init__(options, run)
        self._path = RunFolder(run.folder).metrics
        metrics.cut_back(self._path, run.resumed_step)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def log(self, row: metrics.Row) -> None:
        self._file.write(metrics.line(row))

    def close(self, finished: bool) -> None:
        self._file.close()

    def place(self) -> str:
        return str(self._path)
