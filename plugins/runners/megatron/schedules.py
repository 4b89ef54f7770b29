"""Pipeline schedules: torch's classes, the assignment of stages to ranks, and a simulation."""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

from crosstrain import ConfigError

from .options import Options

_SINGLE: dict[str, Callable[..., Any]] = {"1f1b": schedules.Schedule1F1B, "gpipe": schedules.ScheduleGPipe}
_LOOPED: dict[str, Callable[..., Any]] = {
    "1f1b": schedules.ScheduleInterleaved1F1B,
    "gpipe": schedules.ScheduleLoopedBFS,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}
# Relative times: F forward, B backward, I input gradients, W weight gradients.
_TIMES = {"F": 1, "B": 2, "I": 1, "W": 1}


def rank_of(stage: int, options: Options) -> int:
    """Return the pipeline rank of a stage: round robin; zbv reverses every second round."""
    turn, place = divmod(stage, options.pipeline_parallel)
    return options.pipeline_parallel - 1 - place if options.pipeline_schedule == "zbv" and turn % 2 else place


def stages_of(rank: int, options: Options) -> list[int]:
    """Return the stages of a pipeline rank, in order."""
    return [stage for stage in range(options.stages) if rank_of(stage, options) == rank]


def make_schedule(name: str, stages: list[Any], count: int, **more: Any) -> Any:
    """Return torch's schedule of `count` micro batches for the `stages` of one rank.

    Raises ConfigError for a number of micro batches that the schedule does not support.
    """
    ranks = stages[0].group_size
    if len(stages) == 1 and name in _SINGLE:
        # With fewer micro batches than stages, 1F1B is the same as GPipe, and torch's 1F1B raises an error.
        return _SINGLE[name if count >= ranks else "gpipe"](stages[0], count, **more)
    rounds = max(1, count // ranks)
    if name in ("1f1b", "zero_bubble") and count % rounds:
        raise ConfigError(
            f"run.runner.pipeline_schedule: {name} has {ranks} ranks take micro batches in {rounds} equal rounds, and "
            f"a step has {count}; make them a multiple of {ranks}, or choose gpipe"
        )
    return _LOOPED[name](stages, count, **more)


@cache
def simulate(name: str, ranks: int, chunks: int, count: int) -> tuple[float, list[float]]:
    """Simulate torch's schedule of `count` micro batches on `ranks` with `chunks` stages each.

    Returns (bubble, in flight). bubble: fraction of the step that ranks spend waiting, if all stages take the same time
    and communication takes none. in flight: for each rank, the maximum number of micro batches with activations in
    memory; a micro batch in one stage of the rank counts as 1 / `chunks`. Raises ConfigError as `make_schedule` does.
    """
    plain = chunks == 1 and name == "1f1b"  # torch's 1F1B table omits a micro batch; gpipe has the same bubble
    many: dict[str, Any] = {"group_size": ranks, "group_rank": 0, "num_stages": ranks * chunks, "submod": None}
    stages = [SimpleNamespace(stage_index=chunk, **many) for chunk in range(chunks)]
    table = _LOOPED["gpipe"](stages, count) if plain else make_schedule(name, stages, count)
    left = [[a for a in table.pipeline_order[rank] if a and a.microbatch_index is not None] for rank in range(ranks)]
    ends: dict[tuple[str, int, int], int] = {}
    clock, kept, most = [0] * ranks, [0] * ranks, [0] * ranks
    while any(left):
        before = len(ends)
        for rank, actions in enumerate(left):
            while actions:
                stage, kind, number = actions[0].stage_index, actions[0].computation_type.value, actions[0][2]
                needs = ("F", stage - 1, number) if kind == "F" else ("B", stage + 1, number)
                if 0 <= needs[1] < ranks * chunks and needs not in ends:
                    break
                whole = stage == ranks * chunks - 1 and kind in "IW"  # the last stage does not split its backward
                clock[rank] = max(clock[rank], ends.get(needs, 0)) + (2 * (kind == "I") if whole else _TIMES[kind])
                ends["B" if kind == "I" else kind, stage, number] = clock[rank]
                kept[rank] += (kind == "F") - (kind in "BW")
                most[rank] = max(most[rank], kept[rank])
                del actions[0]
        assert len(ends) > before, "a schedule in which ranks wait for each other"
    if plain and count >= ranks:
        most = [min(count, ranks - rank) for rank in range(ranks)]
    return 1 - 3 * count * chunks / max(clock), [number / chunks for number in most]
