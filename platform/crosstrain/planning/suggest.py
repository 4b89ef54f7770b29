"""Which layouts fit into a device's memory, and what to change where one does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from crosstrain.config.load import Config
from crosstrain.modeling.activation_checkpointing import Mode
from crosstrain.planning.estimate import Estimate, Project, with_options
from crosstrain.utils.errors import UserError
from crosstrain.utils.units import show_bytes

# Slower ones later; `offload` takes fairscale and host memory.
_CHEAPER: tuple[Mode, ...] = ("none", "selective", "full", "offload")


def needs(estimate: Estimate, device: str) -> int:
    """Bytes of the device that the fullest rank takes; on a CPU host memory is the device's."""
    memory = estimate.memory
    return memory.total + (sum(memory.host.values()) if device == "cpu" else 0)


@dataclass
class Advice:
    """The nearest change that fits, or the one that comes closest."""

    settings: list[str]  # key=value, as --options takes them
    needs: int
    fits: bool

    def __str__(self) -> str:
        change = " ".join(self.settings)
        if self.fits:
            return f"nearest that fits: {change} ({show_bytes(self.needs)})"
        return f"nothing tried fits; closest: {change} ({show_bytes(self.needs)}); use more ranks or larger devices"


def nearest(
    project: Project, config: Config, others: Mapping[str, Config], world_size: int, limit: int
) -> Advice | None:
    """The fewest and mildest changes to `config` that fit into `limit` bytes.

    Of gradient checkpointing, micro batch and runner, in this order; of two runners the one that sends less. None: not
    one layout of this project is possible.
    """
    closest: Advice | None = None
    for group in _candidates(config, others):
        fitting: list[tuple[int, Advice]] = []
        for settings, changed in group:
            try:
                estimate = project.estimate("", changed, world_size)
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


def _candidates(config: Config, others: Mapping[str, Config]) -> Iterator[list[tuple[list[str], Config]]]:
    """Groups of changes, the mildest first; the ones of a group are as good as each other."""
    run = config.run
    modes = _CHEAPER[_CHEAPER.index(run.gradient_checkpointing) + 1 :]

    def of(mode: Mode | None, micro: int | None, base: Config = config) -> Config:
        return with_options(base, micro, mode)

    def said(mode: Mode | None, micro: int | None) -> list[str]:
        out = [] if mode is None else [f"run.gradient_checkpointing={mode}"]
        return out if micro is None else [*out, f"run.micro_batch_size={micro}", "run.accum_grad_iters=null"]

    for mode in modes:
        yield [(said(mode, None), of(mode, None))]
    smaller = list(_halves(config))
    for micro in smaller:
        yield [(said(None, micro), of(None, micro))]
    strongest: Mode | None = "full" if "full" in modes else None
    for micro in smaller if strongest else []:
        yield [(said("full", micro), of("full", micro))]
    for how in (None, strongest) if strongest else (None,):
        yield [([f"run.runner={name}", *said(how, None)], of(how, None, base)) for name, base in others.items()]
    if smaller:
        yield [([f"run.runner={name}", *said(strongest, 1)], of(strongest, 1, base)) for name, base in others.items()]


def _halves(config: Config) -> Iterator[int]:
    """Smaller micro batches, where the configuration names one or a global batch that others divide."""
    micro = config.run.micro_batch_size
    while micro is not None and config.run.global_batch_size is not None and micro > 1:
        micro //= 2
        yield micro
