"""The first lines of a run's log: the model, the runner, the batch, and notices about the data."""

from crosstrain.distributed.group import Group
from crosstrain.distributed.launch.cluster_env import restart_reason
from crosstrain.training.trainer import Trainer
from crosstrain.utils.logging import log

_LONGER = "a larger run.max_iters or run.max_epoch goes on, --fresh starts over"


def log_setup(trainer: Trainer) -> None:
    """Log the model, the runner and the batch plan. Collective."""
    runner, plan, config = trainer.runner, trainer.plan, trainer.config
    # Under ZeRO the parameter itself may be empty, and tensor parallelism pads the vocabulary.
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
        "global batch %d = micro %d x accumulation %d x data parallel %d; %d training samples; %s",
        plan.global_batch,
        plan.micro_batch,
        plan.accumulation,
        plan.dp_size,
        len(trainer.dataset),
        f"steps {first} to {last}" if first <= last else f"nothing is left of {last} steps: {_LONGER}",
    )
    held_out = trainer.val_dataset
    for notice in dict.fromkeys((trainer.dataset.notice, held_out.notice if held_out is not None else "")):
        if notice:
            log.warning(notice)


def log_restart(world: Group, step: int) -> None:
    """Log the reason for the restart, if these workers were restarted. Collective."""
    reasons = [reason for reason in world.all_gather(restart_reason()) if reason]
    if reasons:
        _, number, most, why = max(reasons)
        log.info("%s; all ranks started again (restart %d of %d) and go on from step %d", why, number, most, step)
