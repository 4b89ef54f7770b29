"""Find the checkpoint that a run continues from, and go back to one within a process."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from crosstrain.checkpoint import folders
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.weights import load_shards
from crosstrain.distributed.group import Group
from crosstrain.engine.runner import Runner
from crosstrain.train.state import State
from crosstrain.utils.errors import CheckpointError
from crosstrain.utils.logging import log


def starting_point(root: Path, resume_from: str | None, world: Group, run: str | None = None) -> Path | None:
    """The newest undamaged checkpoint under `root`, else the one `resume_from` means, else none. Collective.

    Raises CheckpointError where another run than `run`, which rank 0 knows, wrote the newest one under `root`.
    """
    newest: Path | None = None
    problem: CheckpointError | None = None
    if world.rank == 0:
        try:
            newest = _newest(root, resume_from, run)
        except CheckpointError as error:
            problem = error
    newest, problem = world.all_gather((newest, problem))[0]
    if problem is not None:
        raise problem
    return newest


def _newest(root: Path, resume_from: str | None, run: str | None) -> Path | None:
    newest, damaged = folders.newest_valid(root, run)
    if newest is None and damaged:
        raise CheckpointError(f"{root}: every checkpoint is damaged; --fresh starts over and keeps them")
    if newest is None and resume_from:
        newest = folders.find_checkpoint(Path(resume_from))
    return newest


def restore(checkpoint: Path | None, runner: Runner) -> State:
    """The run's state in a checkpoint, the runner's loss scale with it; a new one without a checkpoint."""
    if checkpoint is None:
        return State()
    state = State.load(checkpoint)
    runner.precision.scaler.load_state(state.scaler)
    log.info("resuming %s at step %d (sample %d)", checkpoint, state.step, state.samples)
    return state


def reload(runner: Runner, checkpoint: Path, frozen: Collection[str]) -> None:
    """Load an earlier state of the run into the runner, except for the `frozen` parameters. Collective."""
    names = set[str]().union(*runner.world.all_gather(set(runner.model.canonical_parameters())))
    load_shards(Reader.open(checkpoint), [s for s in runner.shards() if s.name not in frozen], names=names)
    runner.loaded()
