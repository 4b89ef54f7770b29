"""Evaluate a checkpoint on workers: losses on splits, and the results of evaluation plugins."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from crosstrain.api.evaluation import asked_evaluations
from crosstrain.api.keywords import with_defaults
from crosstrain.api.model import OpenModel
from crosstrain.checkpoint.digests import recorded
from crosstrain.config.load import Config, ProjectLike
from crosstrain.config.registry import registry
from crosstrain.config.sources import Overrides
from crosstrain.data.dataset import Dataset, Split
from crosstrain.data.splits import open_split, prepare_data
from crosstrain.distributed.launch.launcher import launch
from crosstrain.engine.build import make_objective
from crosstrain.engine.checks import check_fit
from crosstrain.inference.open_checkpoint import find_model, open_on_workers
from crosstrain.inference.perplexity import evaluate_loss
from crosstrain.training.reference import read_reference
from crosstrain.utils.errors import EmptySplit
from crosstrain.utils.logging import log, set_up_logging
from crosstrain.utils.processes import main_hidden
from crosstrain.utils.units import finite

_MICRO_BATCH = 8  # samples per forward pass if the run has no micro_batch_size; does not affect the result


def evaluate(
    checkpoint: str | Path,
    splits: Sequence[Split] | None = None,
    options: Overrides = (),
    *,
    project: ProjectLike | None = None,
    nproc_per_node: int = 1,
    max_samples: int | None = None,
    max_new_tokens: int = 64,
    trust_data: bool = False,
    weights: str | None = None,
    **given: Any,
) -> dict[str, Any]:
    """Return the results that `crosstrain evaluate --output` writes.

    The key `splits` contains each split's loss and perplexity. By default, the splits are val and test, if they have
    samples. given: flags of evaluations, such as tasks=["piqa"] and answers=["test"]. The workers are separate
    processes. Raises UserError for mistakes, and KeyboardInterrupt if the workers were stopped.
    """
    flags = with_defaults(given, "evaluation", "evaluate", "evaluations")
    with tempfile.TemporaryDirectory() as folder, main_hidden():
        output = Path(folder) / "results.json"
        job = flags | {
            "checkpoint": checkpoint, "cfg_path": project, "options": options, "trust_data": trust_data,
            "nproc_per_node": nproc_per_node, "splits": splits, "max_samples": max_samples, "output": output,
            "max_new_tokens": max_new_tokens, "weights": weights,
        }  # fmt: skip
        if start_evaluation(job, apart=True):
            raise KeyboardInterrupt
        return json.loads(output.read_text(encoding="utf-8"))


def start_evaluation(job: dict[str, Any], apart: bool = False) -> int:
    """Check the flags in `job`, then start the workers. Returns the exit code.

    With `apart`, even a single worker is a separate process.
    """
    asked = asked_evaluations(job).values()
    alone = any(evaluation.needs_one_process(job) for evaluation in asked)
    checkpoint = find_model(job["checkpoint"], job["weights"])
    config, how = open_on_workers(
        checkpoint, job["cfg_path"], job["options"], job["trust_data"], job["nproc_per_node"], alone
    )
    splits: list[Split] = ["val", "test"] if job["splits"] is None else list(job["splits"])
    needed = [split for evaluation in asked for split in evaluation.splits(job)]
    if opened := dict.fromkeys([*splits, *needed]):
        prepare_data(config)
        for split in opened:
            try:
                _open_split(config, split, checkpoint)
            except EmptySplit as error:
                if job["splits"] is not None or split in needed or splits == [split]:
                    raise EmptySplit(f"{error.args[0]}; choose other splits") from None
                splits.remove(split)
                log.warning("split %s is skipped: %s", split, error.args[0])
    how = replace(how, starts_workers=how.starts_workers or apart)
    job = job | {"checkpoint": checkpoint, "trust": config.trust, "splits": splits}
    return launch(evaluate_worker, (config.plain, job), how)


def _open_split(config: Config, split: Split, checkpoint: Path) -> Dataset:
    """Open a split. If the objective needs reference values, add the values that the checkpoint's run computed."""
    dataset, objective = open_split(config, split), config.run.objective
    if objective is not None and registry.get("objective", objective.name).needs_reference:
        dataset.reference = read_reference(checkpoint, dataset)
    return dataset


def evaluate_worker(plain: dict[str, Any], job: dict[str, Any]) -> int:
    """Evaluate on this rank. Rank 0 writes the results to `job["output"]`."""
    config, checkpoint, asked = Config.from_plain(plain, trust=job["trust"]), job["checkpoint"], asked_evaluations(job)
    with OpenModel(config, checkpoint, text=bool(asked), weights=job["weights"]) as model:
        runner = model.runner
        set_up_logging(None, quiet=not model.is_main)
        results: dict[str, Any] = {"checkpoint": str(checkpoint), "splits": {}}
        if found := recorded(checkpoint):
            results["bitwise"] = found
            log.info("weights sha256:%s | moments sha256:%s", found["weights"], found["moments"])
        results |= {name: evaluation.run(model, job) for name, evaluation in asked.items()}
        if job["splits"]:  # only the losses need the objective; the evaluations above run without it
            runner.objective = make_objective(config, runner.model)
        for split in job["splits"]:
            dataset = _open_split(config, split, checkpoint)
            check_fit(runner.objective, dataset)
            metrics = evaluate_loss(
                runner,
                dataset,
                config.run.micro_batch_size or _MICRO_BATCH,
                job["max_samples"],
                config.run.num_workers,
            )
            results["splits"][split] = metrics.named | {metrics.unit: metrics.targets}
            log.info("%s | %s", split, metrics.line(".6f"))
        if job["output"] and model.is_main:
            job["output"].write_text(json.dumps(finite(results), indent=1) + "\n", encoding="utf-8")
    return 0
