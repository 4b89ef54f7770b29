"""Record the steps of one contestant on one rank: losses, norms, and differences from the reference's tensors."""

import json
import os
import signal
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from crosstrain import IGNORE_INDEX, CheckpointError, Config, MicroBatch, Runner, Step, step_folder
from crosstrain.checkpoint.files import Reader
from crosstrain.distributed.launch.signals import StopRequest
from crosstrain.engine.build import as_stored, make_runner
from crosstrain.training.bad_steps import BadSteps
from crosstrain.training.callback import HookKinds
from crosstrain.training.saving import Saving
from crosstrain.training.trainer import Trainer
from crosstrain.training.worker import build_trainer

from .probe import Probe, digests

Role = Literal["reference", "noise", "noise of sums", "contestant"]

# While a contestant trains, it does not log, validate or save.
_HOOKS: dict[str, HookKinds] = {"hooks_before": {"bad_steps": BadSteps}, "hooks_after": {}}
_NOISES: dict[Role, Literal["products", "sums"]] = {"noise": "products", "noise of sums": "sums"}
# Rates are compared in each step; the others choose a kernel.
_NOT_COMPARED = {"lr", "initial_lr", "lr_scale", "foreach", "fused", "capturable", "differentiable"}
_MOST_PARTS = 16  # a step with more micro batches is not measured one micro batch at a time


@dataclass(frozen=True)
class Job:
    """The part of a comparison that one launch records."""

    role: Role
    folder: Path  # folder of the reference's tensors
    steps: int
    evaluate_after: int  # step after which to measure the loss in evaluation mode again; 0: never
    save: bool = False  # save a checkpoint after step `evaluate_after`
    resumed: bool = False  # resume from the saved checkpoint
    uneven: bool = False  # ignore some targets, so that micro batches differ in their number of targets


def compare_worker(plain: dict[str, Any], job: Job, result: Path) -> int:
    """Train a contestant on this rank; return 0, or the number of the signal received. Rank 0 writes `result`."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # the fork server started with a different value
    config, stop = Config.from_plain(plain), StopRequest(True)
    runner = make_runner(config)
    runner.setup()
    trainer = build_trainer(config, runner, stop, quiet=True, **_HOOKS)
    noise = _NOISES.get(job.role)
    probe = Probe(trainer, job.folder, write=job.role == "reference", noise=noise)
    trainer.hooks.callbacks["probe"] = probe
    record: dict[str, Any] = {}
    if job.resumed:
        earlier = _checkpoint(trainer)
        record["loaded"] = probe.against(earlier, as_stored(earlier.kinds(), runner.held.shards()))
    batches = map(partial(_uneven, runner), trainer.batches()) if job.uneven else trainer.batches()
    step = next(batches)
    record["plain_loss"], targets, record["plain_training"] = _evaluate(runner, step)
    if job.role == "reference" and runner.world.size == 1 and len(step) <= _MOST_PARTS:
        record["parts"] = probe.parts(step, targets)
        if any(routers.has_loss for routers in runner.model.structure.routers()):
            record["parts_without_routers"] = probe.parts(step, targets, router_losses=False)
        record["micro_batches"] = [[micro_batch.first_sample, micro_batch.num_targets] for micro_batch in step]
    rows: list[dict[str, Any]] = []
    for number, step_ in enumerate(islice(chain([step], batches), job.steps), 1):
        batch = Step(reversed(step_)) if noise else step_
        batch.numbers = step_.numbers
        metrics = trainer.train_step(iter([batch]))
        if metrics is None:
            runner.close()
            return stop.received or signal.SIGTERM
        probe.after_update(moments=job.uneven or number in (1, job.steps))
        rows.append(
            {key: getattr(metrics, key) for key in ("step", "loss", "grad_norm", "lr", "samples", "skipped_steps")}
        )
        probe.steps[-1] |= {"data": _by_sample(runner, step_), "routing": probe.routing.record(batch)}
        if number == job.evaluate_after:
            with runner.merged():
                record["later_loss"] = _evaluate(runner, step)[0]
            if job.save:
                try:
                    Saving(None, trainer).save(background=False)
                    trainer.checkpointer.wait()
                    record["saved"] = probe.against(_checkpoint(trainer), runner.held.shards())
                except CheckpointError as error:  # raised on all ranks
                    record["saved"] = {"error": str(error)}
    record |= _facts(trainer) | {"rows": rows, "steps": probe.steps}
    if runner.world.rank == 0:
        result.write_text(json.dumps(record))
    runner.close()
    return 0


def _facts(trainer: Trainer) -> dict[str, Any]:
    """Describe the model and the parallel layout. Collective."""
    runner = trainer.runner
    assert runner.optimizer is not None
    held = runner.world.all_gather([*runner.model.weights.parameters()])
    first = {id(p): name for name, p in runner.model.weights.parameters().items()}
    seen = [id(p) for _, p in runner.model.named_parameters(remove_duplicate=False)]
    return {
        "names": [*dict.fromkeys(chain.from_iterable(held))],
        "tied": [name for key, name in first.items() if seen.count(key) > 1],  # parameters used in more than one place
        "world_size": runner.world.size,
        "dp_size": runner.dp.size,
        "context_size": runner.context.size,
        "accumulation": trainer.plan.accumulation,
        "clip": trainer.run.grad_norm_clip,
        "exact": runner.capabilities.exact,
        "betas": runner.optimizer.param_groups[0].get("betas"),
        "settings": _settings(runner.world.all_gather([_compared(group) for group in runner.optimizer.param_groups])),
        "schedule": [trainer.schedule(step) for step in range(1, 1 + min(trainer.max_iters, 256))],
    }


def _settings(ranks: list[list[dict[str, float]]]) -> dict[str, list[float]]:
    """Return the values of each setting over the groups of parameters of all ranks."""
    found: dict[str, set[float]] = {}
    for group in chain.from_iterable(ranks):
        for key, value in group.items():
            found.setdefault(key, set()).add(value)
    return {key: sorted(values) for key, values in sorted(found.items())}


def _compared(group: dict[str, Any]) -> dict[str, float]:
    """Return the settings of a group of parameters, without rates and choices of a kernel."""
    return {key: value for key, value in group.items() if isinstance(value, int | float) and key not in _NOT_COMPARED}


def _checkpoint(trainer: Trainer) -> Reader:
    """Open the checkpoint of the current step."""
    return Reader.open(step_folder(trainer.folder.checkpoints, trainer.state.step))


def _evaluate(runner: Runner, step: list[MicroBatch]) -> tuple[float, int, bool]:
    """Return a step's evaluation loss, its number of targets, and whether a module was in training mode. Collective."""
    with runner.evaluating():
        training = any(module.training for module in runner.model.modules())
        total = sum(runner.evaluate(micro_batch.data).item() for micro_batch in step)
    total, targets = runner.dp.all_reduce_sum(
        total, sum(micro_batch.num_targets for micro_batch in step), tag="compared loss"
    )
    return total / max(targets, 1), int(targets), training


def _uneven(runner: Runner, step: Step) -> Step:
    """Ignore the first targets of every row of a micro batch; their number depends on the micro batch's first sample.

    Without padding, all micro batches have the same number of targets, and wrong weights would go unnoticed.
    """
    for micro_batch in step:
        labels = micro_batch.data.get("labels")
        if isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point() and labels.shape[1] > 4:
            labels = labels.clone()
            labels[:, : 1 + micro_batch.first_sample * 7 % (labels.shape[1] // 2)] = IGNORE_INDEX
            micro_batch.data = micro_batch.data | {"labels": labels}
            micro_batch.num_targets = runner.objective.num_targets(micro_batch.data)
    return step


def _by_sample(runner: Runner, step: list[MicroBatch]) -> dict[str, dict[str, str]]:
    """Return a dict from the first sample of each micro batch to hashes of the batch's fields. Collective."""
    mine = {str(micro_batch.first_sample): digests(micro_batch.data) for micro_batch in step}
    found = {sample: fields for rank in runner.world.all_gather(mine) for sample, fields in rank.items()}
    return {sample: found[sample] for sample in sorted(found, key=int)}
