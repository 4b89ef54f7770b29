"""Check that a run fits into a device's memory, and find the change that makes it fit at the least cost in speed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter

import torch

from crosstrain import Config, UserError, registry
from crosstrain.engine.checks import batch_plan
from crosstrain.modeling.activation_checkpointing import Mode

from ..units import show_bytes
from .estimate import HOST_COPY, Estimate, Project, with_options, with_same_samples

_MODES: tuple[Mode, ...] = ("none", "selective", "full", "offload")  # fastest first
USABLE = 0.9  # usable fraction of a device's memory; fragmentation, the context and workspaces may need the rest
_Change = tuple[list[str], Config]  # settings in the syntax of --options, and the resulting configuration
_BATCH_AND_MODE = ("micro_batch_size", "accum_grad_iters", "global_batch_size", "gradient_checkpointing")


@dataclass
class Alternatives:
    """Other ways to train a project."""

    runners: Mapping[str, Config | str]  # runner -> configuration with this runner, or error message
    rebuild: Callable[[list[str]], Project]  # rebuilds the project with --options settings; raises UserError


def gpu_memory(config: Config) -> int | None:
    """Return the bytes of memory of this machine's GPU; None on a CPU, because other programs share its memory."""
    if config.run.device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory


def needs(estimate: Estimate, device: str) -> int:
    """Return the largest number of bytes that a rank needs on its device; on a CPU, this includes host memory."""
    return estimate.memory.total + (estimate.memory.on_host if device == "cpu" else 0)


@dataclass
class Advice:
    """The change that fits at the least cost in speed, or else the change that comes closest to fitting."""

    settings: list[str]  # key=value, in the syntax of --options
    needs: int  # bytes
    fits: bool  # True: the run fits and leaves a tenth of the memory free

    def __str__(self) -> str:
        change = f"{' '.join(self.settings)} ({show_bytes(self.needs)})"
        if self.fits:
            return f"cheapest change that fits and leaves a tenth free: {change}"
        return f"no tried change fits and leaves a tenth free; closest: {change}; use more ranks or larger devices"


def nearest(project: Project, others: Alternatives, world_size: int, limit: int) -> Advice | None:
    """Find the changes that make a rank fit into nine tenths of `limit` bytes at the least cost in speed.

    Frozen weights in half precision cost no speed, so every candidate uses them. The other changes are tried in this
    order: smaller micro batches, selective checkpointing, a different runner (the one that sends the fewest bytes),
    full checkpointing, and changes that use host memory. Adapters for pretrained models come last, because they change
    the set of trained parameters.

    If nothing fits, return the change that comes closest; None if no change is possible.
    """
    tried: list[tuple[tuple[int, ...], Advice | None]] = [((2,), None)]  # cost, change
    for settings, variant in _variants(project, others):
        for group in _groups(settings, variant, others, world_size):
            order = len(tried)
            for changes, config in group:
                with suppress(UserError):
                    estimate = variant.estimate(config, world_size)
                    needed = needs(estimate, project.device)
                    offloads = bool(estimate.memory.host.keys() - {HOST_COPY})
                    advice = Advice(changes, needed, needed <= USABLE * limit)
                    # With equal traffic, prefer host memory to disk.
                    if_fits = (0, offloads, order, estimate.sent, -estimate.memory.on_host)
                    tried.append((if_fits if advice.fits else (1, needed), advice))
            cost, best = min(tried, key=itemgetter(0))
            if cost[:2] == (0, False):
                return best
        if cost[0] == 0 and variant.config.adapter is project.config.adapter:
            return best
    return best


def _variants(project: Project, others: Alternatives) -> Iterator[tuple[list[str], Project]]:
    """Yield the project with the model options that save memory, and then also with each adapter."""
    settings = [
        f"model.{key}={value}" for key, value in project.model.structure.lighter(project.config.run.amp.dtype).items()
    ]
    yield settings, others.rebuild(settings) if settings else project
    tuned = project.config.adapter is None and (project.absent or project.model.weights.sources())
    for name in registry.names("adapter") if tuned else ():
        with suppress(UserError):  # the model does not support the adapter, or a package is missing
            yield (adapted := [*settings, f"model.adapter={name}"]), others.rebuild(adapted)


def _groups(settings: list[str], project: Project, others: Alternatives, size: int) -> Iterator[list[_Change]]:
    """Yield groups of changes with about equal cost, cheapest first; `project` was built with `settings`."""
    run, batch = project.config.run, batch_plan(project.config, size)

    def change(mode: Mode | None = None, micro: int | None = None, runner: str = "") -> _Change:
        config, changes = project.config, list(settings)
        if isinstance(other := others.runners.get(runner), Config):
            name, *options = runner.split()
            changes += [f"run.runner={name}", *(f"run.runner.{option}" for option in options)]
            config = with_same_samples(replace(config, run=replace(run, runner=other.run.runner)), batch, size)
        config = with_options(config, micro, mode, None if micro is None else batch.global_batch)
        values = {key: (getattr(run, key), getattr(config.run, key)) for key in _BATCH_AND_MODE}
        changes += [f"run.{key}={'null' if new is None else new}" for key, (old, new) in values.items() if new != old]
        return changes, config

    def runners(mode: Mode | None = None, micro: int | None = None) -> list[_Change]:
        return [change(mode, micro, name) for name, other in others.runners.items() if isinstance(other, Config)]

    smaller = [batch.micro_batch >> n for n in range(1, batch.micro_batch.bit_length())]
    stronger = _MODES[_MODES.index(run.gradient_checkpointing) + 1 :]
    full: Mode | None = "full" if "full" in stronger else None
    if settings:
        yield [change()]
    yield from ([change(None, micro)] for micro in smaller)
    if "selective" in stronger:
        yield [change("selective")]
    yield runners()
    if full:
        yield from ([change(full, micro)] for micro in (None, *smaller))
        yield runners(full)
    yield runners(full, 1)
    if "offload" in stronger:
        yield [change("offload")]
