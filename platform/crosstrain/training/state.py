"""The state of a run without its tensors, and the choice of the checkpoint to resume from."""

import json
import reprlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from crosstrain.checkpoint import folders
from crosstrain.checkpoint.checkpointer import load_state
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.load_weights import load_shards
from crosstrain.config.load import Config
from crosstrain.config.schema import Checker
from crosstrain.distributed.group import Group
from crosstrain.engine.runner import Runner
from crosstrain.utils import storage
from crosstrain.utils.errors import CheckpointError, ConfigError, UserError
from crosstrain.utils.logging import log

Count = Annotated[int, Interval(ge=0, lt=2**62)]
# Fields in every checkpoint. Checkpoints of earlier versions may lack the other fields.
_ALWAYS = {"applied_steps", "samples", "best_loss", "scaler"}


@dataclass
class State:
    """Progress of a run. Random numbers depend only on the seed and on sample positions, so no RNG state is stored."""

    step: Count = 0  # number of attempted steps
    applied_steps: Count = 0  # number of attempted steps that updated the weights; determines the learning rate
    samples: Count = 0  # number of samples consumed so far: the next sample's position in the training order
    uses: Count = 0  # number of steps on the samples from this position on; they are consumed after `BatchPlan.uses`
    best_loss: float | None = None  # lowest validation loss so far; None: no validation yet
    scaler: dict[str, int | float] = field(default_factory=dict)  # state of the loss scaler

    # State of `run.on_bad_step`; samples are given by position in the training order.
    left_out: list[list[Count]] = field(default_factory=list)  # ranges of samples that the run leaves out
    skipped: list[list[Count]] = field(default_factory=list)  # [step, first sample, last sample] of skipped steps
    bad_in_a_row: Count = 0
    overflows_in_a_row: Count = 0
    recent_losses: list[float] = field(default_factory=list)  # losses of good steps, for spike detection

    callbacks: dict[str, dict[str, object]] = field(default_factory=dict)  # name of a callback -> its state
    runner: dict[str, dict[str, object]] = field(default_factory=dict)  # name of a runner -> `Runner.state`
    ended_with: list[object] = field(default_factory=list)  # `run.callbacks` when a callback ended the run; else empty

    def __post_init__(self) -> None:
        rows = self.left_out
        if any(len(row) != 2 or row[0] > row[1] for row in rows) or any(a[1] >= b[0] for a, b in pairwise(rows)):
            raise ValueError(f"left_out is {reprlib.repr(self.left_out)}, not ranges in ascending order")
        if any(len(row) != 3 for row in self.skipped):
            raise ValueError(f"skipped is {reprlib.repr(self.skipped)}, not rows of a step and two samples")

    def give_to(self, runner: Runner) -> None:
        """Restore the runner's loss scale and its own state."""
        runner.precision.scaler.load_state(self.scaler)
        runner.state |= self.runner.get(runner.run.runner.name, {})

    @staticmethod
    def load(checkpoint: Path) -> "State":
        """Read a checkpoint's state. Raises CheckpointError if the state is malformed."""
        saved = load_state(checkpoint)
        if lacking := _ALWAYS - saved.keys():
            raise CheckpointError(f"{checkpoint}: malformed state ({min(lacking)} is missing)")
        checker = Checker(lambda key: f"{checkpoint}: malformed state{'.'.join(('', *key))}")
        known = {f.name: saved[f.name] for f in fields(State) if f.name in saved}
        try:
            return checker.dataclass(State, known, ())
        except ConfigError as error:
            raise CheckpointError(str(error)) from None


def starting_point(root: Path, resume_from: str | None, world: Group, run: str | None = None) -> Path | None:
    """Find the newest undamaged checkpoint under `root`, or else the checkpoint `resume_from`. Collective.

    Returns None if `root` has no checkpoint and `resume_from` is not set. Raises CheckpointError if a run other than
    `run` wrote the newest checkpoint under `root`. `run` is used only on rank 0.
    """

    def check(folder: Path) -> None:  # called on rank 0; the other ranks help to check a checkpoint in a bucket
        if (url := storage.origin(folder)) is None:
            folders.verified(folder)
        else:
            _check_together(world.broadcast(url), world)

    result: Any = None
    if world.rank == 0:
        try:
            newest, damaged = folders.newest_valid(root, run, check)
            folders.warn_of(damaged)
            if newest is None and damaged:
                raise CheckpointError(f"{root}: every checkpoint is damaged; --fresh starts over and keeps them")
            if newest is None and resume_from:
                newest = folders.find_checkpoint(resume_from, check)
            result = [newest and (storage.origin(newest) or newest)]
        except (UserError, OSError) as error:
            result = [error]
    while isinstance(order := world.broadcast(result), str):  # rank 0 sends URLs of checkpoints to check, then a result
        with suppress(UserError, OSError):  # rank 0 gets the same error, and broadcasts it
            _check_together(order, world)
    if isinstance(order[0], Exception):
        raise order[0]
    return order[0] and storage.local(order[0])  # the path on this machine


def _check_together(url: str, world: Group) -> None:
    """Check a checkpoint in a bucket, one part on each rank. An error on any rank is raised on all. Collective."""
    # Return only the folder: `together` gathers the results, and a `Reader` is large.
    world.together(lambda: folders.verified(storage.local(url), share=(world.rank, world.size)).folder)


def continues(checkpoint: Path, config: Config) -> bool:
    """Return True if a run's checkpoint and `config` agree in model, optimizer, freeze and resume_optimizer."""
    then, now = load_state(checkpoint)["config"], config.plain
    keys = "optimizer", "freeze", "resume_optimizer"
    return then["model"] == now["model"] and all(then["run"][key] == now["run"][key] for key in keys)


def changes(then: Mapping[str, Any], now: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Yield changes between plain configurations, such as `run.seed 1 -> 2`; keys in only one of them are ignored."""
    for name, new in now.items():
        old, key = then.get(name, new), f"{at}{name}"
        parts = old, new
        if all(isinstance(part, Mapping) for part in parts) and old.get("name") == new.get("name"):
            yield from changes(old, new, f"{key}.")
        elif old != new:
            was, is_now = (part.get("name", part) if isinstance(part, Mapping) else part for part in parts)
            yield f"{key} {json.dumps(was)[:60]} -> {json.dumps(is_now)[:60]}"


def restore(checkpoint: Path | None, runner: Runner) -> State:
    """Load the run's state and the runner's loss scale from a checkpoint; without a checkpoint, return a new state."""
    if checkpoint is None:
        return State()
    state = State.load(checkpoint)
    state.give_to(runner)
    log.info("resuming %s at step %d (sample %d)", storage.origin(checkpoint) or checkpoint, state.step, state.samples)
    return state


def reload(runner: Runner, checkpoint: Path, frozen: Collection[str]) -> None:
    """Load a checkpoint of the run into the runner, except for the `frozen` parameters. Collective."""
    here = {*runner.model.weights.parameters(), *runner.model.weights.buffers()}
    names = set[str]().union(*runner.world.all_gather(here))
    reader, shards = Reader.open(checkpoint), [s for s in runner.held.shards() if s.name not in frozen]
    load_shards(reader, shards, names=names)
    runner.loaded()
