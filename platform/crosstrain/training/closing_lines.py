"""The last lines of a run's log: how the run ended, and the files and commands for the next steps."""

from importlib.util import find_spec

from crosstrain.data.tokenizer import TOKENIZER
from crosstrain.training.trainer import Trainer
from crosstrain.utils.logging import log
from crosstrain.utils.program import command
from crosstrain.utils.trust import names_command


def log_end(trainer: Trainer) -> None:
    """Log how training ended, and the files and commands for the next steps."""
    step = trainer.state.step
    if trainer.stopped:
        log.info("stopped at step %d; the same command, without --fresh, goes on from there", step)
        return
    if trainer.state.ended_with:
        log.info("a callback ended the run at step %d; it goes on only with other run.callbacks", step)
    places = [place for hook in trainer.hooks.call("places") for place in hook]
    lines = [("checkpoint", f"{trainer.folder.address}/checkpoints"), *places, *_next_commands(trainer)]
    log.info("open next:\n%s", "\n".join(f"  {title:<12} {where}" for title, where in lines))


def _next_commands(trainer: Trainer) -> list[tuple[str, str]]:
    """Return (title, command) pairs for the next steps with this run; paths are relative to the working directory."""
    run, folder, dataset, tokenizer = trainer.run, trainer.folder, trainer.dataset, trainer.dataset.tokenizer_path
    checkpoint: list[object] = ["--checkpoint", folder.address]
    if run.plugins or names_command(trainer.config.plain):  # not allowed from a checkpoint without --cfg-path
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
