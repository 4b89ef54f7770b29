"""One training worker, from the configuration to the last checkpoint: read `build_trainer` first."""

import signal
import textwrap
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain.checkpoint import folders
from crosstrain.checkpoint.checkpointer import Checkpointer, Retention, load_state
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.batch import BatchPlan
from crosstrain.config.load import Config
from crosstrain.config.schema import to_plain
from crosstrain.data.splits import open_split, training_dataset
from crosstrain.data.tokenizer import TOKENIZER
from crosstrain.distributed.group import Group
from crosstrain.distributed.launch.cluster_env import restart_reason
from crosstrain.distributed.launch.signals import StopRequest
from crosstrain.engine.build import build_model, check_tokenizer, make_runner, make_schedule
from crosstrain.engine.runner import Runner
from crosstrain.modeling.objective import ModelWithObjective
from crosstrain.monitor.profiler import Profiler
from crosstrain.monitor.reporter import Reporter
from crosstrain.training.bad_steps import BadSteps
from crosstrain.training.prompt_samples import PromptSamples
from crosstrain.training.reference import add_reference, reference_file
from crosstrain.training.state import changes, continues, restore, starting_point
from crosstrain.training.trainer import Trainer
from crosstrain.utils.assets import GENERATION_CONFIG, TOKENIZER_FILES, add_end_tokens, copy_files, plain_files
from crosstrain.utils.errors import CheckpointError, ConfigError
from crosstrain.utils.logging import log, set_up_logging
from crosstrain.utils.processes import on_parents_death
from crosstrain.utils.program import command
from crosstrain.utils.trust import names_command

_FEW_TOKENS, _DEVIATION = 10_000, 2.5  # of a validation; the standard deviation of a token's loss in nats, about
_MOST_CHANGES = 10  # that a line of the log lists
_LENGTHS = ("run.max_iters ", "run.max_epoch ")  # begin the changes of a run's length
_LONGER = "a larger run.max_iters or run.max_epoch goes on, --fresh starts over"


def train_worker(plain: dict[str, Any], under_launcher: bool) -> int:
    """Train on this rank; returns the signal that stopped it, or 0."""
    config = Config.from_plain(plain)
    runner = make_runner(config)
    runner.setup()
    stop = StopRequest(under_launcher)  # not before: a rank that waits for the others has nothing to save
    trainer = build_trainer(config, runner, stop)
    if under_launcher:
        on_parents_death(signal.SIGINT)  # save and leave
    try:
        _log_restart(runner.world, trainer.state.step)
        trainer.fit()
        if not trainer.stopped:
            _log_summary(trainer)
    except Exception:
        if runner.world.size == 1:  # else a save may wait for a rank that is gone
            with suppress(Exception):  # of the save; the first error counts
                trainer.checkpointer.wait()
            trainer.folder.release()  # for the error to be noted there
        raise
    finally:
        trainer.folder.close()
    runner.close()
    return int(stop.received or signal.SIGTERM) if trainer.stopped else 0  # only some ranks may know which signal


def build_trainer(config: Config, runner: Runner, stop: StopRequest, quiet: bool = False) -> Trainer:
    """Build the parts of a run in order: folder, data, schedule, model and optimizer, state, reports. Collective."""
    folder = _open_folder(config, runner.world, quiet)
    try:
        return _build_in(folder, config, runner, stop)
    except Exception:
        folder.release()
        raise


def _build_in(folder: RunFolder, config: Config, runner: Runner, stop: StopRequest) -> Trainer:
    run, rank = config.run, runner.world.rank
    dataset = open_split(config, "train")
    val_dataset = open_split(config, "val") if run.eval_interval else None
    plan = BatchPlan.of(run, runner.dp.size)
    max_iters = plan.steps(run, len(dataset))
    if run.curriculum is not None:
        run.curriculum.check(dataset.sequence_length)
    schedule = make_schedule(config, max_iters)

    start = starting_point(folder.checkpoints, run.resume_from, runner.world, folder.run_id)
    if start is not None:
        check_tokenizer(start, dataset)
    own = start is not None and start.parent == folder.checkpoints
    moments = run.resume_optimizer or start is None or (own and continues(start, config))
    if not moments:
        log.info("run.resume_optimizer is false: the optimizer's state in %s is left behind", start)
    changed = [] if start is None or not own else [*changes(load_state(start)["config"], config.plain)]
    if start is not None and changed:
        log.info("changed since %s: %s", start.name, ", ".join(changed[:_MOST_CHANGES]))
    try:
        frozen = build_model(config, runner, start, for_training=True, moments=moments)  # the runner now holds both
    except CheckpointError as error:
        if own and any(change.startswith("model") for change in changed):
            raise CheckpointError(f"{error} Another run.output_dir, or --fresh, begins anew") from None
        raise
    state = restore(start, runner)
    longer = state.step < max_iters and run.lr_decay_iters is None
    if longer and any(change.startswith(_LENGTHS) for change in changed):
        rate, step = schedule(state.applied_steps + 1), state.step + 1
        log.info("the learning rate's schedule spans %d steps now: %.3E at step %d", max_iters, rate, step)

    if isinstance(runner.model, ModelWithObjective) and runner.model.objective.needs_reference:
        for split in filter(None, (dataset, val_dataset)):
            earlier = None if start is None else reference_file(start.parent.parent, split.split)
            add_reference(
                split, runner, runner.model.objective, (run.amp, sorted(frozen.items())), plan.micro_batch,
                run.num_workers, reference_file(folder.path, split.split), earlier,
            )  # fmt: skip

    tokenizer = dataset.tokenizer_path
    tokenizer_files = plain_files(tokenizer, TOKENIZER_FILES) if tokenizer is not None else []

    def write_assets(checkpoint: Path) -> None:
        """Make a checkpoint a Hugging Face folder."""
        runner.model.save_config(checkpoint)
        copy_files(tokenizer_files, checkpoint)
        if dataset.end_tokens:
            add_end_tokens(checkpoint / GENERATION_CONFIG, dataset.end_tokens)

    def write_parts(checkpoint: Path, reader: Reader) -> None:
        runner.model.save_parts(checkpoint, reader.names("param"), reader.whole)

    retention = Retention(run.keep_last, run.keep_every)
    checkpointer = Checkpointer(
        folder.checkpoints, runner.new_group(), retention, write_assets, folder.run_id, write_parts
    )
    saved_step = state.step if own else None
    if saved_step is not None and rank == 0:
        checkpointer.damaged = {step for step in folders.steps(folder.checkpoints) if step > saved_step}
    if start is not None and saved_step is None and state.step >= max_iters:
        raise ConfigError(
            f"run.resume_from: {start} is at step {state.step}, and this run ends after step {max_iters}: train longer "
            f"(run.max_iters or run.max_epoch), or begin anew from its weights (model.pretrained)"
        )
    if saved_step is None or state.ended_with != to_plain(run.callbacks):  # another run, or other callbacks
        state.ended_with = []
    bad_steps = BadSteps(runner, dataset, folder if rank == 0 else None)
    profiler = Profiler(run.profile, folder.profile, rank, runner.device)
    reporter = Reporter(runner, config, folder, state.step, max_iters, plan.global_batch)
    samples = PromptSamples(runner, run, tokenizer)
    trainer = Trainer(
        config, runner, stop, folder, dataset, val_dataset, plan, max_iters, schedule, state, frozen, checkpointer,
        saved_step, bad_steps, reporter, profiler, samples, start,
    )  # fmt: skip
    if rank == 0:
        folder.describe()  # not before everything that may be refused
    _log_setup(trainer)
    return trainer


def _open_folder(config: Config, world: Group, quiet: bool) -> RunFolder:
    """The run's folder, made and held by rank 0, and the log in it. Collective."""
    folder, is_main = RunFolder(config.run.output_dir), world.rank == 0
    if is_main:
        folder.create(config.plain, folders.newest_run(folder.checkpoints))
    folder.check_shared(world)
    folder.run_id = world.broadcast(folder.run_id)
    set_up_logging(folder.log if is_main else None, quiet=quiet or not is_main, write=folder.append)
    return folder


# ---- log lines


def _log_setup(trainer: Trainer) -> None:
    """Log model, runner and batch plan. Collective."""
    runner, plan, config, held_out = trainer.runner, trainer.plan, trainer.config, trainer.val_dataset
    # ZeRO keeps a parameter's own shape elsewhere; tensor parallelism pads the vocabulary for its ranks.
    mine = {
        n: (p.requires_grad, max(runner.full_shape(p).numel(), p.numel()))
        for n, p in runner.model.canonical_parameters().items()
    }
    own = [(runner.held(p), getattr(p, "to_local", p.detach)()) for p in runner.model.parameters()]
    here = sum(max(held.numel(), part.numel()) for held, part in own)
    parameters = {name: count for held in runner.world.all_gather(mine) for name, count in held.items()}
    log.info(
        "%s: %s parameters (%s trainable, %s on rank 0), runner %s on %d %s worker(s), %s", config.model.name,
        f"{sum(n for _, n in parameters.values()):,}", f"{sum(n for trains, n in parameters.values() if trains):,}",
        f"{here:,}",
        config.run.runner.name, runner.world.size, runner.device.type, config.run.amp.dtype,
    )  # fmt: skip
    first, last = trainer.state.step + 1, trainer.max_iters
    log.info(
        "global batch %d = micro %d x accumulation %d x data parallel %d; %d training samples; %s",
        plan.global_batch, plan.micro_batch, plan.accumulation, plan.dp_size, len(trainer.dataset),
        f"steps {first} to {last}" if first <= last else f"nothing is left of {last} steps: {_LONGER}",
    )  # fmt: skip
    for notice in dict.fromkeys((trainer.dataset.notice, held_out.notice if held_out is not None else "")):
        if notice:
            log.warning(notice)
    if held_out is not None and held_out.indexed and held_out.row_layout is None and runner.model.predicts_tokens:
        sample = held_out.collate([held_out.get(0, np.random.default_rng(0))])
        tokens = min(config.run.eval_iters * plan.global_batch, len(held_out)) * runner.model.num_targets(sample)
        if 0 < tokens < _FEW_TOKENS:
            about = "validation sees about %d tokens, so its loss is uncertain by about %.2f; raise run.eval_iters"
            log.info(f"{about}, or give it more data", tokens, _DEVIATION / tokens**0.5)


def _log_restart(world: Group, step: int) -> None:
    """Log why these workers were started again, if they were. Collective."""
    reasons = [reason for reason in world.all_gather(restart_reason()) if reason]
    if reasons:
        _, number, most, why = max(reasons)
        log.info("%s; all ranks started again (restart %d of %d) and go on from step %d", why, number, most, step)


def _log_summary(trainer: Trainer) -> None:
    """Log the final perplexity beside baselines that no training gives, a named test split's loss, samples of text,
    and what to open next.
    """
    if trainer.val_dataset is not None and trainer.ends_validated:
        metrics = trainer.last_validation or trainer.validate()
        if trainer.last_validation is None:
            log.info("validation %s", metrics.line(".6E"))
        if metrics.of_tokens:
            loss, tokens = metrics.loss, metrics.targets
            log.info("validation perplexity %.2f (loss %.4f, %d tokens)", metrics.perplexity, loss, tokens)
        if trainer.is_main and metrics.of_tokens:
            for name, perplexity in trainer.val_dataset.baselines().items():
                log.info("  against %.2f of the %s model, which learns nothing from context", perplexity, name)
    if getattr(training_dataset(trainer.config).options, "test", None):  # the split is named
        log.info("test %s", trainer.validate(open_split(trainer.config, "test")).line(".6E"))
    for sample in trainer.last_samples if trainer.last_validation else trainer.samples.draw():
        text = sample["prompt"] + sample["text"]
        log.info("sample of generated text:\n%s", textwrap.indent(text, "    | ", lambda _: True))
    checkpoints = f"{trainer.folder.address}/checkpoints"
    lines = [("checkpoint", checkpoints), *trainer.reporter.trackers.places(), *_next_commands(trainer)]
    log.info("open next:\n%s", "\n".join(f"  {what:<12} {where}" for what, where in lines))


def _next_commands(trainer: Trainer) -> list[tuple[str, str]]:
    """Titles and commands that can work on this run, from the working directory."""
    run, folder, dataset, tokenizer = trainer.run, trainer.folder, trainer.dataset, trainer.dataset.tokenizer_path
    checkpoint: list[object] = ["--checkpoint", folder.address]
    if run.plugins or names_command(trainer.config.plain):  # which are not taken from a checkpoint
        checkpoint += ["--cfg-path", folder.config]
    lines = []
    if trainer.runner.model.predicts_tokens and tokenizer is not None and (tokenizer / TOKENIZER).is_file():
        chat = ["--chat"] if dataset.end_tokens else []
        lines.append(("try it", command("evaluate", *checkpoint, "--interactive", *chat)))
        if all(find_spec(package) for package in ("uvicorn", "starlette", "pydantic")):
            lines.append(("serve it", command("serve", *checkpoint)))
    else:
        split = ["--splits", "val"] if trainer.val_dataset is not None else ["--splits", "train", "--max-samples", 100]
        lines.append(("evaluate it", command("evaluate", *checkpoint, *split)))
    if (folder.path / "export").exists():
        return lines
    return [*lines, ("export it", command("export", *checkpoint, "--output", f"{folder.address}/export"))]
