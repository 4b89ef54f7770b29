"""Pipeline schedules: torch's classes, the idle time of ranks, and the number of micro batches in flight."""

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import schedules

from crosstrain import ConfigError

from .options import Options

_SINGLE: dict[str, Callable[..., Any]] = {"1f1b": schedules.Schedule1F1B, "gpipe": schedules.ScheduleGPipe}
_LOOPED: dict[str, Callable[..., Any]] = {
    "1f1b": schedules.ScheduleInterleaved1F1B,
    "gpipe": schedules.ScheduleLoopedBFS,
}


def make_schedule(name: str, stages: list[Any], count: int, **more: Any) -> Any:
    """Return torch's schedule of `count` micro batches for the `stages` of one rank.

    Raises ConfigError for a number of micro batches that the schedule does not support.
    """
    ranks = stages[0].group_size
    if len(stages) == 1:
        # With fewer micro batches than stages, 1F1B is the same as GPipe, and torch's 1F1B raises an error.
        return _SINGLE[name if count >= ranks else "gpipe"](stages[0], count, **more)
    if name == "1f1b":
        _round(ranks, count)
    return _LOOPED[name](stages, count, **more)


def _round(ranks: int, count: int) -> int:
    """Return the number of micro batches in a round of interleaved 1F1B. Raises ConfigError for unequal rounds."""
    rounds = max(1, count // ranks)
    if count % rounds:
        raise ConfigError(
            f"run.runner.pipeline_schedule: 1f1b on {ranks} ranks takes the micro batches of a step in {rounds} equal "
            f"rounds, but there are {count}; use a multiple of {ranks}, or choose gpipe"
        )
    return count // rounds


def bubble(ranks: int, chunks: int, count: int) -> float:
    """Return the fraction of a step in which ranks are idle, with `count` micro batches and `chunks` stages per rank.

    The formula assumes that all stages take equal time, and communication takes no time (Narayanan et al., 2021,
    section 2.2).
    """
    return 1 - count * chunks / (max(count, ranks) * chunks + min(count, ranks) - 1)


def in_flight(options: Options, rank: int, count: int) -> float:
    """Return the maximum number of micro batches, out of `count`, that have activations on a rank at once.

    A micro batch in one of the rank's stages counts as 1 / `pipeline_chunks`. Raises ConfigError for a number of micro
    batches that the schedule does not support.
    """
    ranks, chunks = options.pipeline_parallel, options.pipeline_chunks
    if options.pipeline_schedule == "gpipe" or (chunks == 1 and count < ranks):
        return count
    if chunks == 1:
        return min(count, ranks - rank)
    warmup = (chunks - 1) * _round(ranks, count) + 2 * (ranks - 1 - rank)
    return min(count * chunks, warmup + 1) / chunks
