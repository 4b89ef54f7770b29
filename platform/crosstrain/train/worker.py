"""What every training worker runs."""

from __future__ import annotations

import signal
import textwrap

from crosstrain.config.load import Config
from crosstrain.distributed.group import Group
from crosstrain.distributed.launch.cluster_env import restart_reason
from crosstrain.distributed.launch.signals import StopRequest
from crosstrain.engine.build import make_runner
from crosstrain.train.trainer import Trainer
from crosstrain.utils.logging import log


def tell(world: Group, step: int) -> None:
    """Log, if so, that these workers were started again, and go on from `step`. Collective."""
    reasons = [reason for reason in world.all_gather(restart_reason()) if reason]
    if reasons:
        _, number, most, why = max(reasons)
        log.info("%s; all ranks started again (restart %d of %d) and go on from step %d", why, number, most, step)


def train_worker(plain: dict, under_launcher: bool) -> int:
    """What every worker runs; returns the signal that stopped it, or 0."""
    stop = StopRequest(under_launcher)
    config = Config.from_plain(plain)
    runner = make_runner(config)
    runner.setup()
    trainer = Trainer(config, runner, stop)
    tell(runner.world, trainer.state.step)
    trainer.fit()
    if not trainer.stopped:
        _farewell(trainer)
    runner.close()
    return int(stop.received or signal.SIGTERM) if trainer.stopped else 0  # which one, only some ranks may know


def _farewell(trainer: Trainer) -> None:
    """How good the model is, beside what no training gives; a sample of its text; what to open next."""
    run = trainer.run
    # A run too short for its first validation, such as a smoke run, does not end in one either.
    if trainer.val_dataset is not None and run.eval_interval is not None and run.eval_interval <= trainer.max_iters:
        metrics = trainer.last_validation or trainer.validate()
        log.info("validation perplexity %.2f (loss %.4f, %d tokens)", metrics.perplexity, metrics.loss, metrics.targets)
        if trainer.is_main:
            for name, perplexity in trainer.val_dataset.baselines().items():
                log.info("  against %.2f of the %s model, which learns nothing from context", perplexity, name)
    for sample in trainer.last_samples if trainer.last_validation else trainer.samples.draw():
        text = sample["prompt"] + sample["text"]
        log.info("sample of generated text:\n%s", textwrap.indent(text, "    | ", lambda _: True))
    folder = trainer.folder
    lines = [
        ("checkpoint", f"{folder.checkpoints} (`crosstrain export` makes a Hugging Face folder of one)"),
        *trainer.reporter.trackers.places(),
        ("try it", f"python evaluate.py --checkpoint {folder.path} --interactive"),
    ]
    log.info("open next:\n%s", "\n".join(f"  {what:<12} {where}" for what, where in lines))
