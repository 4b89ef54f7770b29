"""MLflow tracking. https://mlflow.org/docs/latest/ml/tracking"""

import os
import time
from dataclasses import dataclass
from typing import Any

from crosstrain import Row, Text, TrackedRun, Tracker, flat, registry, require, scalars, texts

_MAX_VALUE = 500  # maximum length of a parameter's value that all MLflow servers accept
_MAX_BATCH = 100  # maximum number of parameters per request


@registry.register_tracker("mlflow")
class MlflowTracker(Tracker):
    """MLflow, on a server, in a database or in the run's folder."""

    remote = True

    @dataclass
    class Options:
        uri: Text | None = None  # URI of a server or database; None: MLFLOW_TRACKING_URI, or SQLite in the run's folder
        experiment: Text = "crosstrain"  # name of the experiment; created if it does not exist
        run_name: Text | None = None  # name of the run; None: the name of the run's folder

    @classmethod
    def check(cls, options: Options) -> None:
        require("mlflow", "tracker 'mlflow'")

    def __init__(self, options: Options, run: TrackedRun) -> None:
        super().__init__(options, run)
        self._entities = require("mlflow.entities", "tracker 'mlflow'")
        folder = run.folder.resolve() / "mlflow"
        folder.mkdir(exist_ok=True)
        ours = f"sqlite:///{folder}/mlflow.db"
        self._uri = options.uri or os.environ.get("MLFLOW_TRACKING_URI") or ours
        self._client = require("mlflow.tracking", "tracker 'mlflow'").MlflowClient(tracking_uri=self._uri)
        artifacts = f"file://{folder}/artifacts" if self._uri == ours else None
        self._id = run.remembered("mlflow", lambda: self._create(artifacts))
        self._client.update_run(self._id, status="RUNNING")
        # last step on the server; a resumed run logs only later steps
        self._last = int(self._client.get_run(self._id).data.metrics.get("step", 0))

    def _create(self, artifacts: str | None) -> str:
        """Create a run with its hyperparameters, and return its ID."""
        client, options = self._client, self.options
        experiment = client.get_experiment_by_name(options.experiment)
        number = experiment.experiment_id if experiment else client.create_experiment(options.experiment, artifacts)
        run_id = client.create_run(number, run_name=options.run_name or self.run.name).info.run_id
        parameters = [self._entities.Param(k, str(v)[:_MAX_VALUE]) for k, v in flat(self.run.config)]
        for start in range(0, len(parameters), _MAX_BATCH):
            client.log_batch(run_id, params=parameters[start : start + _MAX_BATCH])
        return run_id

    def log(self, row: Row) -> None:
        step, now = row["step"], int(1000 * time.time())
        if step <= self._last:
            return
        numbers: dict[str, Any] = {"step": step, **dict(scalars(row))}
        self._client.log_batch(self._id, [self._entities.Metric(k, float(v), now, step) for k, v in numbers.items()])
        for tag, text in texts(row):
            self._client.log_text(self._id, text, f"{tag}/step_{step:06d}.txt")
        self._last = step

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")

    def place(self) -> str:
        return f"mlflow ui --backend-store-uri {self._uri} (run {self._id})"
