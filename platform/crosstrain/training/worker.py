"""A training worker, from the configuration to the last checkpoint; start reading at `train_worker`."""

import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstrain.checkpoint import folders
from crosstrain.checkpoint.checkpointer import Checkpointer, load_state
from crosstrain.checkpoint.digests import conditions, digests
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.manifest import FrozenParameter
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.batch import BatchPlan
from crosstrain.config.load import Config
from crosstrain.config.schema import to_plain
from crosstrain.data.dataset import Dataset
from crosstrain.data.splits import open_split
from crosstrain.distributed.group import Group
from crosstrain.distributed.launch import membership
from crosstrain.distributed.launch.signals import StopRequest
from crosstrain.engine.build import build_model, make_runner, make_schedule
from crosstrain.engine.checks import check_tokenizer
from crosstrain.engine.runner import Runner, leave_groups, runner_class
from crosstrain.training.callback import HookKinds
from crosstrain.training.carried import Carried, Handover
from crosstrain.training.reference import add_reference
from crosstrain.training.run_lines import log_end, log_setup
from crosstrain.training.state import changes, continues, restore, starting_point
from crosstrain.training.trainer import Trainer
from crosstrain.utils.assets import GENERATION_CONFIG, TOKENIZER_FILES, add_end_tokens, copy_files, plain_files
from crosstrain.utils.errors import CheckpointError, ConfigError
from crosstrain.utils.logging import log, set_up_logging

_MOST_CHANGES = 10  # maximum number of changed settings in a log line
_LENGTHS = ("run.max_iters ", "run.max_epoch ")  # prefixes of logged changes that affect the length of the run


@dataclass
class _Kept:
    """What a worker keeps when an epoch of changing workers ends."""

    carried: Carried | None = None
    stop: StopRequest | None = None


def train_worker(plain: dict[str, Any], under_launcher: bool) -> int:
    """Train on this rank, and return the signal that stopped training, or 0."""
    config = Config.from_plain(plain)
    kept, apart = _Kept(), not runner_class(config.run).capabilities.exact
    while membership.current is not None:
        before = membership.current.epoch.number
        if membership.current.enter(kept.carried.part if kept.carried else None, apart).number > before + 1:
            kept.carried = None  # this worker was left out of an epoch, so its state is old
        with suppress(membership.Regroup):
            return _train(config, under_launcher, kept)
        leave_groups()
    return _train(config, under_launcher, kept)


def _train(config: Config, under_launcher: bool, kept: _Kept) -> int:
    """Train until the end of the run, or of this epoch of changing workers.

    kept: from the last epoch; updated when this epoch ends. Raises Regroup at the end of an epoch.
    """
    runner, trainer = make_runner(config), None
    try:
        runner.setup()
        if kept.stop is None:
            kept.stop = StopRequest(under_launcher)  # not before setup, because before it there is nothing to save
        trainer = build_trainer(config, runner, kept.stop, carried=kept.carried)
        return _fit(trainer)
    except Exception as error:
        if not isinstance(error, membership.Regroup) and not membership.ends_only_the_epoch(error):
            raise
        if trainer is not None:
            with suppress(Exception):  # a save that needs a lost rank has failed
                trainer.checkpointer.wait()
            trainer.folder.release()
            kept.carried = Carried.of(trainer)
        raise membership.Regroup from None


def _fit(trainer: Trainer) -> int:
    runner = trainer.runner
    try:
        if membership.news:
            log.info("%s from step %d", membership.news, trainer.state.step)
        trainer.fit()
        log_end(trainer)
    except Exception:
        if runner.world.size == 1:  # with more ranks, a save may wait for a dead rank
            with suppress(Exception):  # report the first error, not an error of the save
                trainer.checkpointer.wait()
            trainer.folder.release()  # so that the error can be recorded in the folder
        raise
    finally:
        trainer.folder.close()
    runner.close()
    return int(trainer.stop.received or signal.SIGTERM) if trainer.stopped else 0  # not every rank receives the signal


def build_trainer(
    config: Config,
    runner: Runner,
    stop: StopRequest,
    quiet: bool = False,
    carried: Carried | None = None,
    **hooks: HookKinds,
) -> Trainer:
    """Build the parts of a run in this order: folder, data, schedule, model and optimizer, state. Collective.

    carried: this rank's part of the state to go on from; if no rank has one, the newest checkpoint is loaded.
    hooks: `hooks_before` and `hooks_after` of `Trainer`.
    """
    folder = _open_folder(config, runner.world, quiet)
    try:
        handover = Handover.of(carried, runner.world) if membership.current is not None else None
        trainer = _build_in(folder, config, runner, stop, handover, hooks)
        if handover is not None:
            handover.restore_hooks(trainer)
    except Exception:
        folder.release()
        raise
    if runner.world.rank == 0:
        folder.describe(config.plain)  # last, after all checks
    log_setup(trainer)
    return trainer


def _build_in(
    folder: RunFolder, config: Config, runner: Runner, stop: StopRequest, handover: Handover | None,
    hooks: dict[str, HookKinds],
) -> Trainer:  # fmt: skip
    run = config.run
    dataset = open_split(config, "train")
    val_dataset = open_split(config, "val") if run.eval_interval else None
    plan = BatchPlan.of(run, runner.dp.size)
    max_iters = plan.steps(run, len(dataset))
    if run.curriculum is not None:
        run.curriculum.check(dataset.sequence_length)
    schedule = make_schedule(config, max_iters)
    start = None if handover else starting_point(folder.checkpoints, run.resume_from, runner.world, folder.run_id)
    check_tokenizer(start, dataset)
    own = start is not None and start.parent == folder.checkpoints
    changed = _changes(start if own else None, config)
    frozen = _build_model(config, runner, start, own, changed)
    state = restore(start, runner) if handover is None else handover.restore(runner)
    if state.step < max_iters and run.lr_decay_iters is None and any(c.startswith(_LENGTHS) for c in changed):
        rate, step = schedule(state.applied_steps + 1), state.step + 1
        log.info("the learning-rate schedule now spans %d steps: %.3E at step %d", max_iters, rate, step)
    if runner.objective.needs_reference is not None:
        for split in filter(None, (dataset, val_dataset)):
            add_reference(split, runner, plan.micro_batch, run.num_workers, folder.path, start)
    saved_step = handover.saved_step if handover is not None else state.step if own else None
    if start is not None and not own and state.step >= max_iters:
        raise ConfigError(
            f"run.resume_from: {start} is at step {state.step}, but this run ends after step {max_iters}: train longer "
            f"(run.max_iters or run.max_epoch), or start a new run from its weights (model.pretrained)"
        )
    if not own or state.ended_with != to_plain(run.callbacks):  # the run or its callbacks have changed
        state.ended_with = []
    return Trainer(
        config=config,
        runner=runner,
        stop=stop,
        folder=folder,
        dataset=dataset,
        val_dataset=val_dataset,
        plan=plan,
        max_iters=max_iters,
        schedule=schedule,
        state=state,
        frozen=frozen,
        saved_step=saved_step,
        start=start,
        checkpointer=_make_checkpointer(config, runner, folder, dataset, saved_step),
        **hooks,
    )


def _open_folder(config: Config, world: Group, quiet: bool) -> RunFolder:
    """Create and lock the run's folder on rank 0, and set up logging. Collective."""
    folder, is_main = RunFolder(config.run.output_dir), world.rank == 0
    if is_main:
        folder.create(config.plain, folders.newest_run(folder.checkpoints))
    folder.check_shared(world)
    folder.run_id = world.broadcast(folder.run_id)
    set_up_logging(folder.log if is_main else None, quiet=quiet or not is_main)
    return folder


def _changes(start: Path | None, config: Config) -> list[str]:
    """Log and return the settings that changed since `start`, a checkpoint of this run; None: no checkpoint."""
    changed = [*changes(load_state(start)["config"], config.plain)] if start is not None else []
    if start is not None and changed:
        log.info("settings changed since %s: %s", start.name, ", ".join(changed[:_MOST_CHANGES]))
    return changed


def _build_model(
    config: Config, runner: Runner, start: Path | None, own: bool, changed: list[str]
) -> dict[str, FrozenParameter]:
    """Build the runner's model and optimizer, load `start`, and return frozen parameters from pretrained folders."""
    moments = config.run.resume_optimizer or start is None or (own and continues(start, config))
    if not moments:
        log.info("run.resume_optimizer is false: the optimizer state in %s is not loaded", start)
    try:
        return build_model(config, runner, start, for_training=True, moments=moments)
    except CheckpointError as error:
        if any(change.startswith("model") for change in changed):
            raise CheckpointError(f"{error}; to start over, use a different run.output_dir, or --fresh") from None
        raise


def _make_checkpointer(
    config: Config, runner: Runner, folder: RunFolder, dataset: Dataset, saved_step: int | None
) -> Checkpointer:
    """Create a checkpointer that also writes the files of a Hugging Face model folder. Collective."""
    tokenizer = dataset.tokenizer_path
    tokenizer_files = plain_files(tokenizer, TOKENIZER_FILES) if tokenizer is not None else []

    def write_assets(checkpoint: Path, reader: Reader) -> dict[str, Any] | None:
        runner.model.export.save_config(checkpoint)
        copy_files(tokenizer_files, checkpoint)
        if dataset.end_tokens:
            add_end_tokens(checkpoint / GENERATION_CONFIG, dataset.end_tokens)
        runner.model.export.save_parts(checkpoint, reader.names("param"), reader.whole)
        if not config.run.bitwise.enabled:
            return None
        return {"bitwise": digests(reader) | {"conditions": conditions(runner.device)}}

    checkpointer = Checkpointer(
        folder.checkpoints,
        runner.world.twin(),
        write_assets,
        folder.run_id,
        keep_last=config.run.keep_last,
        keep_every=config.run.keep_every,
    )
    if saved_step is not None and runner.world.rank == 0:
        checkpointer.damaged = {step for step in folders.steps(folder.checkpoints) if step > saved_step}
    return checkpointer
