"""`crosstrain evaluate --tasks`: tasks of lm-evaluation-harness."""

import argparse
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from crosstrain import Evaluation, UserError, registry, require

if TYPE_CHECKING:
    from crosstrain import OpenModel


@registry.register_evaluation("tasks")
class Tasks(Evaluation):
    """Run tasks of lm-evaluation-harness."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--tasks", nargs="+", default=[], metavar="NAME", help="tasks of lm-evaluation-harness to run"
        )
        parser.add_argument("--task-path", metavar="DIR", help="folder with additional task files for the harness")

    def is_asked(self, given: Mapping[str, Any]) -> bool:
        """Return True if --tasks is given.

        Raises UserError if the harness is missing, or for --task-path without --tasks.
        """
        if given["tasks"]:
            require("lm_eval", "--tasks")
        elif given["task_path"]:
            raise UserError("--task-path: needs --tasks with the names of the tasks to run")
        return bool(given["tasks"])

    def run(self, model: "OpenModel", given: Mapping[str, Any]) -> Any:
        from .lm_eval_harness import HarnessModel, run_tasks
        from .remembered import key_of

        encode, key = partial(model.encoders.encode, "text"), key_of(model, given["weights"])
        return run_tasks(
            HarnessModel(model.runner, model.tokenizer, encode, key=key),
            given["tasks"],
            given["task_path"],
            given["max_samples"],
        )
