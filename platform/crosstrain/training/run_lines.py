"""The first and the last lines of a run's log.

The first lines describe the model, the runner and the batch, and contain notices about the data. The last lines
describe how the run ended, and list files and commands for the next steps.
"""

from importlib.util import find_spec

from crosstrain.data.tokenizer import TOKENIZER
from crosstrain.training.trainer import Trainer
from crosstrain.utils.logging import log
from crosstrain.utils.program import command
from crosstrain.utils.trust import names_command

_LONGER = "raise run.max_iters or run.max_epoch to continue, or start over with --fresh"


def log_setup(trainer: Trainer) -> None:
    """Log the model, the runner and the batch plan. Collective."""
    runner, plan, config = trainer.runner, trainer.plan, trainer.config
    # Take the larger count: under ZeRO, a parameter may be an empty tensor; with tensor parallelism, it may have more
    # elements than its full shape, because the vocabulary is padded.
    mine = {
        n: (p.requires_grad, max(runner.held.full_shape(p).numel(), p.numel()))
        for n, p in runner.model.weights.parameters().items()
    }
    own = [(runner.held.weight(p), getattr(p, "to_local", p.detach)()) for p in runner.model.parameters()]
    here = sum(max(held.numel(), part.numel()) for held, part in own)
    parameters = {name: count for held in runner.world.all_gather(mine) for name, count in held.items()}
    log.info(
        "%s: %s parameters (%s trainable, %s on rank 0), runner %s on %d %s worker(s), %s",
        config.model.name,
        f"{sum(n for _, n in parameters.values()):,}",
        f"{sum(n for trains, n in parameters.values() if trains):,}",
        f"{here:,}",
        config.run.runner.name,
        runner.world.size,
        runner.device.type,
        config.run.amp.dtype,
    )
    first, last = trainer.state.step + 1, trainer.max_iters
    log.info(
        "global batch %s%d = micro %d x accumulation %d x data parallel %d; %d training samples; %s",
        f"{plan.warmup.start} to " if plan.warmup else "",
        plan.global_batch,
        plan.micro_batch,
        plan.accumulation,
        plan.dp_size,
        len(trainer.dataset),
        f"steps {first} to {last}" if first <= last else f"all {last} steps are done: {_LONGER}",
    )
    notices = [split.notice for split in (trainer.dataset, trainer.val_dataset) if split is not None]
    for notice in filter(None, dict.fromkeys(notices)):
        log.warning(notice)


def log_end(trainer: Trainer) -> None:
    """Log how training ended, and the files and commands for the next steps."""
    step = trainer.state.step
    if trainer.stopped:
        log.info("stopped at step %d; the same command without --fresh continues from there", step)
        return
    if trainer.state.ended_with:
        log.info("a callback ended the run at step %d; it continues only with different run.callbacks", step)
    places = [place for hook in trainer.hooks.call("places") for place in hook]
    lines = [("checkpoint", f"{trainer.folder.address}/checkpoints"), *places, *_next_commands(trainer)]
    log.info("open next:\n%s", "\n".join(f"  {title:<12} {where}" for title, where in lines))


def _next_commands(trainer: Trainer) -> list[tuple[str, str]]:
    """Return (title, command) pairs for the next steps with this run; paths are relative to the working directory."""
    run, folder, dataset, tokenizer = trainer.run, trainer.folder, trainer.dataset, trainer.dataset.tokenizer_path
    checkpoint: list[object] = ["--checkpoint", folder.address]
    if run.plugins or names_command(trainer.config.plain):  # plugins, and data from commands, need --cfg-path
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
