"""Check that a run fits into a device's memory, and find the mildest change that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from crosstrain.config.load import Config
from crosstrain.modeling.activation_checkpointing import Mode
from crosstrain.planning.estimate import Estimate, Project, with_options
from crosstrain.utils.errors import UserError
from crosstrain.utils.program import command
from crosstrain.utils.units import show_bytes

# Slower ones later; `offload` takes fairscale and host memory.
_CHEAPER: tuple[Mode, ...] = ("none", "selective", "full", "offload")
_Change = tuple[list[str], Config]  # settings as --options takes them, and the configuration with them


def gpu_memory(config: Config) -> int | None:
    """Bytes of this machine's GPU; None for a CPU, whose memory other programs use, too."""
    if config.run.device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory


def check_memory(project: Project, world_size: int, limit: int) -> None:
    """Raise UserError, with the nearest change that fits, where a rank needs more than `limit` bytes."""
    needed = needs(project.estimate(project.config, world_size), project.device)
    if needed > limit:
        advice = nearest(project, {}, world_size, limit)
        raise UserError(
            f"a rank would need {show_bytes(needed)} of memory, and its device has {show_bytes(limit)}"
            f"{f'; {advice}' if advice else ''}; `{command('plan')}` shows other layouts, and --no-fit-check starts it"
        )


def needs(estimate: Estimate, device: str) -> int:
    """Bytes that the fullest rank needs on its device; on a CPU, host memory included."""
    return estimate.memory.total + (estimate.memory.on_host if device == "cpu" else 0)


@dataclass
class Advice:
    """The mildest change that fits, or the one that comes closest."""

    settings: list[str]  # key=value, as --options takes them
    needs: int  # bytes
    fits: bool

    def __str__(self) -> str:
        change = f"{' '.join(self.settings)} ({show_bytes(self.needs)})"
        if self.fits:
            return f"nearest that fits: {change}"
        return f"nothing tried fits; closest: {change}; use more ranks or larger devices"


def nearest(project: Project, others: Mapping[str, Config], world_size: int, limit: int) -> Advice | None:
    """The fewest and mildest changes to the project that fit into `limit` bytes; None where no layout is possible.

    Gradient checkpointing changes first, then the micro batch, then the runner; of two runners the one that sends less.
    """
    closest: Advice | None = None
    for group in _candidates(project.config, others):
        fitting: list[tuple[int, Advice]] = []
        for settings, changed in group:
            try:
                estimate = project.estimate(changed, world_size)
            except UserError:
                continue
            needed = needs(estimate, project.device)
            advice = Advice(settings, needed, needed <= limit)
            if advice.fits:
                fitting.append((estimate.sent, advice))
            elif closest is None or advice.needs < closest.needs:
                closest = advice
        if fitting:
            return min(fitting, key=lambda one: one[0])[1]
    return closest


def _candidates(config: Config, others: Mapping[str, Config]) -> Iterator[list[_Change]]:
    """Groups of equally mild changes, the mildest group first."""
    modes = _CHEAPER[_CHEAPER.index(config.run.gradient_checkpointing) + 1 :]

    def change(mode: Mode | None = None, micro: int | None = None, runner: str | None = None) -> _Change:
        settings = [] if runner is None else [f"run.runner={runner}"]
        settings += [] if mode is None else [f"run.gradient_checkpointing={mode}"]
        settings += [] if micro is None else [f"run.micro_batch_size={micro}", "run.accum_grad_iters=null"]
        return settings, with_options(config if runner is None else others[runner], micro, mode)

    smaller: list[int] = []  # micro batches, where the configuration names one and a global batch that it divides
    micro = config.run.micro_batch_size if config.run.global_batch_size is not None else None
    while micro is not None and micro > 1:
        micro //= 2
        smaller.append(micro)
    strongest: Mode | None = "full" if "full" in modes else None
    yield from ([change(mode)] for mode in modes)
    yield from ([change(None, micro)] for micro in smaller)
    if strongest:
        yield from ([change(strongest, micro)] for micro in smaller)
    yield [change(None, None, name) for name in others]
    if strongest:
        yield [change(strongest, None, name) for name in others]
    if smaller:
        yield [change(strongest, 1, name) for name in others]
