"""A callback that runs tasks of lm-evaluation-harness at each validation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosstrain import Callback, ConfigError, FilePath, PositiveInt, RunOptions, log, registry, require
from crosstrain.inference.encoding import open_tokenizer, text_encoder


@registry.register_callback("eval_tasks")
class EvalTasks(Callback):
    """Runs tasks at each validation, and adds their metrics to the row as `<task>/<metric>`."""

    @dataclass
    class Options:
        tasks: list[str]  # tasks and groups of lm-evaluation-harness, or of configs/tasks
        task_path: FilePath | None = None  # folder with additional task files, which may name Python functions
        max_samples: PositiveInt | None = 200  # documents per task; None: all

    @classmethod
    def check(cls, options: Any, run: RunOptions) -> None:
        if run.eval_interval is None:
            raise ConfigError("run.callbacks: eval_tasks needs validations; set run.eval_interval")
        require("lm_eval", "run.callbacks: eval_tasks")

    def __init__(self, options: Any, trainer: Any) -> None:
        super().__init__(options, trainer)
        folder = trainer.dataset.tokenizer_path
        if folder is None:
            raise ConfigError("run.callbacks: eval_tasks needs a dataset with a tokenizer")
        self._tokenizer = open_tokenizer(folder)
        self._encode = text_encoder(self._tokenizer)

    def on_validation(self, metrics: Mapping[str, float]) -> None:
        """Run the tasks. Collective."""
        with self.trainer.throughput.paused():
            from .lm_eval_harness import HarnessModel, run_tasks

            model = HarnessModel(self.trainer.runner, self._tokenizer, self._encode, quiet=True)
            found = run_tasks(model, self.options.tasks, self.options.task_path, self.options.max_samples)
        scores = {
            f"{task}/{name.removesuffix(',none')}": value
            for task, values in found.items()
            for name, value in values.items()
            if value is not None and "," in name and "_stderr" not in name
        }
        self.trainer.row |= scores
        log.info("tasks: %s", ", ".join(f"{name} {value:.4g}" for name, value in scores.items()))
