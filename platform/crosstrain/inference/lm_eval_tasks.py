"""Tasks of lm-evaluation-harness, for `crosstrain evaluate --tasks`."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crosstrain.engine.runner import Runner
from crosstrain.utils.errors import UserError, sentence
from crosstrain.utils.logging import log
from crosstrain.utils.optional_deps import require
from crosstrain.utils.units import finite

_BOOTSTRAPS = 1000  # draws for standard errors that have no formula


def run_tasks(
    runner: Runner, tokenizer: Any, encode: Callable[[str], list[int]], tasks: list[str], folder: str | None,
    limit: int | None, is_main: bool,
) -> dict[str, Any]:  # fmt: skip
    """Metrics by task. Collective; all ranks compute the same. UserError for unknown tasks and missing data.

    `folder` has task files beyond the harness's own; `limit`: documents of each task.
    """
    evaluator = require("lm_eval.evaluator", "--tasks")
    from lm_eval.tasks import TaskManager

    from crosstrain.inference.lm_eval_model import HarnessModel

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"--task-path: {folder} is not a folder")
    manager = TaskManager(include_path=folder)
    known = manager.all_tasks
    for name in tasks:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else "--task-path names a folder with others"
            raise UserError(f"--tasks: the harness has no task {name}; {hint}")
    model = HarnessModel(runner, tokenizer, encode, quiet=not is_main)
    with runner.evaluating():
        try:
            found = evaluator.simple_evaluate(
                model, tasks=tasks, task_manager=manager, limit=limit, bootstrap_iters=_BOOTSTRAPS, log_samples=False
            )
        except (OSError, ValueError, KeyError) as error:  # of data that is not there, or a task file
            raise UserError(f"--tasks: the harness cannot do it ({type(error).__name__}: {sentence(error)})") from error
    results: dict[str, Any] = {}
    for name, metrics in (found or {"results": {}})["results"].items():  # the harness gives them to the first rank
        results[name] = {key: finite(value) for key, value in metrics.items() if isinstance(value, (int, float))}
        for key, value in results[name].items():
            if value is not None and "_stderr" not in key and "," in key:
                metric, _, filtered = key.partition(",")
                spread = results[name].get(f"{metric}_stderr,{filtered}")
                log.info("%s | %s %.6g%s", name, metric, value, f" (standard error {spread:.2g})" if spread else "")
    return runner.world.broadcast(results)
