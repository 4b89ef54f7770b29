"""Estimates of a rank's memory and communication, computed by a runner before any rank starts."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from crosstrain.config.batch import BatchPlan
from crosstrain.config.run_options import RunOptions
from crosstrain.modeling.base import Model
from crosstrain.modeling.forward_mode import Head
from crosstrain.utils.types import Batch


@dataclass(frozen=True)
class PlanContext:
    """A planned run: a model on the meta device, with the run's frozen parameters, and the ranks that train it.

    torch's process group is a fake group of `world_size` ranks; this process is rank 0, and collectives do nothing.
    """

    model: Model
    inputs: Batch  # a micro batch on the meta device
    run: RunOptions
    world_size: int
    batch: BatchPlan
    device: str  # cpu or cuda
    replicas: int  # number of ranks that copy or shard the same parameters: data-parallel times context-parallel size


@dataclass
class Layout:
    """Memory of one rank and the bytes it sends in a step. Fields are in bytes unless marked as elements."""

    parameters: int  # parameters that stay on the device
    updated: int  # elements that this rank's optimizer updates and keeps state for
    held: int  # elements of parameters that this rank keeps between steps, on the device or the host
    whole: int | None = None  # elements of the model over all ranks, with padding; None: same as on a single rank
    gradients: int = 0  # gradients that stay allocated during the whole micro batch
    retained_grad_fraction: float = 0.0  # fraction of each gradient that is kept from the backward until the step
    retained_grad_fraction_outside: float | None = None  # the same fraction outside of blocks; None: equal
    masters: int = 0  # the optimizer's master copy of the parameters, not counted as optimizer state
    gathered: int = 0  # peak memory of parameters gathered from other ranks
    buffers: int = 0  # communication buffers while micro batches are computed
    gradient_buffers: int = 0  # communication buffers from the backward's first gradient on, with unsent gradients
    step_buffers: int = 0  # communication buffers between the last backward and the end of the step
    sent: int = 0  # bytes sent in a step, except by collectives inside forward and backward, which are traced
    host: dict[str, int] = field(default_factory=dict)  # purpose -> host memory, without optimizer state
    optimizer: Literal["device", "host", "disk"] = "device"  # where the optimizer state is kept
    in_flight: float = 1  # number of micro batches with live activations
    bubble: float = 0.0  # fraction of the step in which a rank waits for other pipeline stages
    model: Model | None = None  # this rank's part of the model, on the meta device; None: the whole model
    head: Head | None = None  # this rank's output head; None: the plain head
    autocast: bool = True  # False: this rank's part computes in the dtype of its parameters
    computes: str = ""  # key of the memory trace: layouts with equal keys are traced once
    kind: str = ""  # name of this kind of rank, such as a pipeline stage


# Fields of Layout that are sums over the parameters, so that layouts of two sets of parameters can be added.
_SUMS = (
    "parameters", "updated", "held", "gradients", "masters", "gathered", "buffers", "gradient_buffers", "step_buffers",
    "sent",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model's parameters, in bytes or elements; a tied parameter counts once."""

    parameters: int
    trainable: int
    trainable_elements: int
    elements: int
    largest_block: int
    outside_blocks: int

    @staticmethod
    def of(model: Model, among: Container[nn.Parameter] | None = None) -> Sizes:
        """Return the sizes of all parameters, or only of the parameters in `among`."""

        def some(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
            return [p for p in parameters if among is None or p in among]

        blocks = [numbers(some(block.parameters())) for block in model.blocks()]
        everything = some(model.parameters())
        total, trained = numbers(everything), numbers(p for p in everything if p.requires_grad)
        inside = numbers(p for block in model.blocks() for p in some(block.parameters()))[0]
        largest = max((size for size, _ in blocks), default=0)
        return Sizes(total[0], trained[0], trained[1], total[1], largest, total[0] - inside)


def numbers(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Return the bytes and the elements of parameters; a tied parameter counts once."""
    each = {id(p): p for p in parameters}.values()
    return sum(p.numel() * p.element_size() for p in each), sum(p.numel() for p in each)


def all_reduced(size: int, ranks: int) -> int:
    """Bytes that a rank sends in a ring all-reduce of `size` bytes: 2 (n - 1) / n * size (Patarasuk & Yuan, 2009)."""
    return 2 * size * (ranks - 1) // ranks


def scattered(size: int, ranks: int) -> int:
    """Bytes that a rank sends in an all-gather or reduce-scatter of `size` bytes in total: (n - 1) / n * size."""
    return size * (ranks - 1) // ranks


def share(size: int, ranks: int) -> int:
    """Size of the largest of `ranks` parts: `size / ranks`, rounded up."""
    return -(-size // ranks)


def data_parallel(at: PlanContext) -> Layout:
    """Layout of plain data parallelism: every rank holds the whole model, and gradients are summed."""
    ranks = at.replicas
    return replicated(Sizes.of(at.model), ranks, ranks == 1 and at.batch.accumulation == 1)


def with_experts(model: Model, copies: int, expert_parallel: int, describe: Callable[[Sizes, int], Layout]) -> Layout:
    """Layout of a rank when `expert_parallel` of the `copies` ranks share the experts.

    model: the rank's part of the model. `describe(sizes, ranks)` returns the layout of parameters on `ranks` ranks.
    """
    if expert_parallel == 1:
        return describe(Sizes.of(model), copies)
    experts = {p for module in model.structure.experts().values() for p in module.parameters()}
    sizes = Sizes.of(model, set(model.parameters()) - experts), Sizes.of(model, experts)
    rest, theirs = describe(sizes[0], copies), describe(sizes[1], copies // expert_parallel)
    for name in _SUMS:
        setattr(rest, name, getattr(rest, name) + getattr(theirs, name))
    part = sizes[1].trainable / max(sizes[0].trainable + sizes[1].trainable, 1)
    rest.retained_grad_fraction += part * (theirs.retained_grad_fraction - rest.retained_grad_fraction)
    rest.host = {purpose: size + theirs.host[purpose] for purpose, size in rest.host.items()}
    return rest


def replicated(sizes: Sizes, ranks: int, once: bool) -> Layout:
    """Layout of `ranks` ranks that each hold all parameters and sum their gradients.

    once: the step has only one backward, so gradients are allocated one by one. Otherwise all gradients stay allocated.
    """
    return Layout(
        parameters=sizes.parameters,
        held=sizes.elements,
        updated=sizes.trainable_elements,
        gradients=0 if once else sizes.trainable,
        retained_grad_fraction=1.0 if once else 0.0,
        sent=all_reduced(sizes.trainable, ranks),
    )


def fully_sharded(
    sizes: Sizes,
    at: PlanContext,
    ranks: int,
    *,
    regather: bool,
    offload: bool,
    every: bool,
    gathered: Sizes | None = None,
    half_sums: bool = False,
) -> Layout:
    """Layout of torch's FSDP2; `ranks` ranks share a copy of the model.

    While a block computes, the next one is gathered; parameters outside of blocks stay gathered. `regather`: blocks are
    freed after their forward. `every`: gradients are reduced after every micro batch, not only after the last.
    `gathered`: sizes of the gathered parameters, in their compute dtypes; None: same as `sizes`. `half_sums`: gradients
    are summed in the dtypes of `gathered`.
    """
    mine, trained = share(sizes.parameters, ranks), share(sizes.trainable, ranks)
    rounds, whole = at.batch.accumulation, gathered or sizes
    block, outside = min(sizes.largest_block, sizes.trainable), min(sizes.outside_blocks, sizes.trainable)
    most = whole.outside_blocks + 2 * whole.largest_block if regather else whole.parameters
    waits = rounds > 1 and not every  # unsharded gradients accumulate until the last micro batch
    shares = 0 if offload else trained
    copies = at.replicas // ranks
    sent = scattered(whole.parameters, ranks) * rounds
    sent += scattered(whole.trainable if half_sums else sizes.trainable, ranks) * (rounds if every else 1)
    if regather:
        sent += scattered(whole.parameters - whole.outside_blocks, ranks) * rounds
    return Layout(
        parameters=0 if offload else mine,
        held=share(sizes.elements, ranks),
        updated=share(sizes.trainable_elements, ranks),
        gradients=sizes.trainable if waits else shares if every else 0,
        retained_grad_fraction=shares / max(whole.trainable, 1) if not waits and not every else 0.0,
        retained_grad_fraction_outside=0.0 if waits else 1.0,  # these gradients are reduced last
        gathered=most,
        # A block's gradients are copied for the reduce-scatter while the next block computes its own. All gradient
        # shards are allocated by the time the gradients outside of blocks are reduced.
        gradient_buffers=2 * block,
        step_buffers=max(0, 2 * outside - (sizes.trainable - shares if waits else 0)),
        sent=sent + all_reduced(trained, copies),
        host={"parameters": mine, "gradients": trained} if offload else {},
        optimizer="host" if offload else "device",
    )
