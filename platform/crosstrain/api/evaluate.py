"""Evaluate a checkpoint on workers: losses on splits, questions with reference answers, and external tasks."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from crosstrain.api.model import OpenModel
from crosstrain.config.load import Config, ProjectLike
from crosstrain.config.registry import registry
from crosstrain.config.sources import Overrides
from crosstrain.data.dataset import Dataset, Split
from crosstrain.data.splits import open_split, prepare_data
from crosstrain.distributed.launch.launcher import launch
from crosstrain.engine.build import make_objective
from crosstrain.engine.checks import check_fit
from crosstrain.inference.generation import Sampling
from crosstrain.inference.open_checkpoint import find_model, open_on_workers
from crosstrain.inference.perplexity import evaluate_loss
from crosstrain.inference.vqa import answer_splits
from crosstrain.training.reference import read_reference
from crosstrain.utils.errors import EmptySplit, UserError
from crosstrain.utils.logging import log, set_up_logging
from crosstrain.utils.optional_deps import require
from crosstrain.utils.processes import main_hidden
from crosstrain.utils.units import finite

_MICRO_BATCH = 8  # samples per forward pass if the run has no micro_batch_size; does not affect the result

Talk = Callable[[OpenModel, dict[str, Any]], list[dict[str, Any]]]


def evaluate(
    checkpoint: str | Path,
    splits: Sequence[Split] | None = None,
    options: Overrides = (),
    *,
    project: ProjectLike | None = None,
    nproc_per_node: int = 1,
    max_samples: int | None = None,
    answers: Sequence[Split] = (),
    sheet: str | Path | None = None,
    max_new_tokens: int = 64,
    tasks: Sequence[str] = (),
    task_path: str | None = None,
    trust_data: bool = False,
    weights: str | None = None,
) -> dict[str, Any]:
    """Return the results that `crosstrain evaluate --output` writes: `splits` has each split's loss and perplexity.

    By default the splits are val and test, if they have samples. The workers are separate processes. Raises UserError,
    and KeyboardInterrupt if the workers were stopped.
    """
    with tempfile.TemporaryDirectory() as folder, main_hidden():
        output = Path(folder) / "results.json"
        job = {
            "checkpoint": checkpoint, "cfg_path": project, "options": options, "trust_data": trust_data,
            "nproc_per_node": nproc_per_node, "splits": splits, "max_samples": max_samples, "answers": [*answers],
            "sheet": sheet and Path(sheet), "tasks": [*tasks], "task_path": task_path, "output": output,
            "sampling": Sampling(max_new_tokens), "weights": weights,
        }  # fmt: skip
        if start_evaluation(job, apart=True):
            raise KeyboardInterrupt
        return json.loads(output.read_text(encoding="utf-8"))


def start_evaluation(job: dict[str, Any], talk: Talk | None = None, *, alone: bool = False, apart: bool = False) -> int:
    """Check the flags in `job`, then start the workers. Returns the exit code.

    `talk` generates further completions. With `alone`, there is only one process. With `apart`, even a single worker is
    a separate process.
    """
    if job["sheet"] and not job["answers"]:
        raise UserError("--sheet: shows what --answers found; give both")
    if job["tasks"]:
        require("lm_eval", "--tasks")
    elif job["task_path"]:
        raise UserError("--task-path: name tasks with --tasks")
    checkpoint = find_model(job["checkpoint"], job["weights"])
    config, how = open_on_workers(
        checkpoint, job["cfg_path"], job["options"], job["trust_data"], job["nproc_per_node"], alone
    )
    splits: list[Split] = ["val", "test"] if job["splits"] is None else list(job["splits"])
    if opened := dict.fromkeys([*splits, *job["answers"]]):
        prepare_data(config)
        for split in opened:
            try:
                _open_split(config, split, checkpoint)
            except EmptySplit as error:
                if job["splits"] is not None or split in job["answers"] or splits == [split]:
                    raise EmptySplit(f"--splits, --answers: {error.args[0]}; name others") from None
                splits.remove(split)
                log.warning("%s is left out: %s", split, error.args[0])
    how = replace(how, starts_workers=how.starts_workers or apart)
    job = job | {"checkpoint": checkpoint, "trust": config.trust, "splits": splits}
    return launch(evaluate_worker, (config.plain, job, talk), how)


def _open_split(config: Config, split: Split, checkpoint: Path) -> Dataset:
    """Open a split, with the reference values that the checkpoint's run measured for its objective."""
    dataset, objective = open_split(config, split), config.run.objective
    if objective is not None and registry.get("objective", objective.name).needs_reference:
        dataset.reference = read_reference(checkpoint, dataset)
    return dataset


def evaluate_worker(plain: dict[str, Any], job: dict[str, Any], talk: Talk | None) -> int:
    """Evaluate on this rank. Rank 0 writes the results to `job["output"]`."""
    config, checkpoint = Config.from_plain(plain, trust=job["trust"]), job["checkpoint"]
    text = bool(job["answers"] or job["tasks"] or talk)
    with OpenModel(config, checkpoint, text=text, weights=job["weights"]) as model:
        runner, is_main = model.runner, model.runner.world.rank == 0
        set_up_logging(None, quiet=not is_main)
        results: dict[str, Any] = {"checkpoint": str(checkpoint), "splits": {}, "completions": []}
        micro_batch = config.run.micro_batch_size or _MICRO_BATCH

        if job["answers"]:
            results["answers"] = answer_splits(config, runner, model.tokenizer, job, job["sampling"], is_main)
        if job["tasks"]:
            from crosstrain.inference.lm_eval_harness import run_tasks

            encode = partial(model.encoders.encode, "text")
            results["tasks"] = run_tasks(
                runner, model.tokenizer, encode, job["tasks"], job["task_path"], job["max_samples"], is_main
            )
        if talk is not None:
            results["completions"] = talk(model, job)
        if job["splits"]:  # do this last: only this part needs the objective
            runner.objective = make_objective(config, runner.model)
        for split in job["splits"]:
            dataset = _open_split(config, split, checkpoint)
            check_fit(runner.objective, dataset)
            metrics = evaluate_loss(runner, dataset, micro_batch, job["max_samples"], config.run.num_workers)
            results["splits"][split] = metrics.named | {metrics.unit: metrics.targets}
            log.info("%s | %s", split, metrics.line(".6f"))
        if job["output"] and is_main:
            job["output"].write_text(json.dumps(finite(results), indent=1) + "\n", encoding="utf-8")
    return 0
