"""Memory and traffic of a rank, as a runner describes them before any rank exists."""

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
    """A planned run: a model on the meta device, frozen as the run freezes it, and the ranks that train it.

    torch's process group is a fake one of `world_size` ranks, this one the first; exchanges do nothing.
    """

    model: Model
    inputs: Batch  # a micro batch on the meta device
    run: RunOptions
    world_size: int
    batch: BatchPlan
    device: str  # cpu or cuda
    replicas: int  # ranks that have or share one copy of the same parameters: data-parallel ones, and their contexts


@dataclass
class Layout:
    """Memory that one rank holds and bytes that it sends in a step. Fields are bytes unless they say elements."""

    parameters: int  # held on the device all the time
    updated: int  # elements that this rank's optimizer updates, with state for each
    held: int  # elements of parameters that this rank keeps between steps, wherever they are
    whole: int | None = None  # elements of the model on all ranks, with padding; None: as on a single rank
    gradients: int = 0  # allocated all the time while a micro batch is computed
    retained_grad_fraction: float = 0.0  # of each gradient of the backward, kept until the step
    retained_grad_fraction_outside: float | None = None  # outside of blocks; None: the same
    masters: int = 0  # the optimizer's own copy of the parameters, beside its state
    gathered: int = 0  # parameters of other ranks, at the peak
    buffers: int = 0  # for communication while micro batches are computed
    gradient_buffers: int = 0  # for communication from the first gradient of a backward on, waiting gradients included
    step_buffers: int = 0  # for communication between the last backward and the end of the step
    sent: int = 0  # in a step, beside the exchanges within forward and backward, which are traced
    host: dict[str, int] = field(default_factory=dict)  # host memory by purpose, without optimizer state
    optimizer: Literal["device", "host", "disk"] = "device"  # place of the optimizer state
    in_flight: float = 1  # micro batches whose activations are kept at once
    bubble: float = 0.0  # part of the step in which ranks wait for each other's stages
    model: Model | None = None  # the rank's part of the model, on the meta device; None: all of it
    head: Head | None = None  # of the rank; None: the plain one
    autocast: bool = True  # False: the rank's part computes in its own type
    computes: str = ""  # key of the trace: layouts with equal keys are traced once
    kind: str = ""  # name of this kind of rank, such as a pipeline stage


# Fields of a layout that are sums over the parameters which it describes.
_SUMS = (
    "parameters", "updated", "held", "gradients", "masters", "gathered", "buffers", "gradient_buffers", "step_buffers",
    "sent",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parameters, in and outside of blocks; a tied parameter counts once."""

    parameters: int
    trainable: int
    trainable_elements: int
    elements: int
    largest_block: int
    outside_blocks: int

    @staticmethod
    def of(model: Model, among: Container[nn.Parameter] | None = None) -> Sizes:
        """Sizes of all parameters, or of those `among`."""

        def some(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
            return [p for p in parameters if among is None or p in among]

        blocks = [numbers(some(block.parameters())) for block in model.blocks()]
        everything = some(model.parameters())
        total, trained = numbers(everything), numbers(p for p in everything if p.requires_grad)
        inside = numbers(p for block in model.blocks() for p in some(block.parameters()))[0]
        largest = max((size for size, _ in blocks), default=0)
        return Sizes(total[0], trained[0], trained[1], total[1], largest, total[0] - inside)


def numbers(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Bytes and elements of parameters; a tied one counts once."""
    each = {id(p): p for p in parameters}.values()
    return sum(p.numel() * p.element_size() for p in each), sum(p.numel() for p in each)


def all_reduced(size: int, ranks: int) -> int:
    """Bytes that a rank sends to sum `size` bytes by a ring (Patarasuk & Yuan, 2009): 2 (n - 1) / n of them."""
    return 2 * size * (ranks - 1) // ranks


def scattered(size: int, ranks: int) -> int:
    """Bytes that a rank sends to gather `size` bytes from everybody, or to sum them and keep its part: (n - 1) / n."""
    return size * (ranks - 1) // ranks


def share(size: int, ranks: int) -> int:
    """The largest of `ranks` parts."""
    return -(-size // ranks)


def data_parallel(at: PlanContext) -> Layout:
    """Layout of plain data parallelism: every rank holds everything, and gradients are summed."""
    ranks = at.replicas
    return replicated(Sizes.of(at.model), ranks, ranks == 1 and at.batch.accumulation == 1)


def with_experts(
    model: Model, copies: int, expert_parallel: int, describe: Callable[[Sizes, int], Layout]
) -> Layout:
    """Layout of a rank with its part of the experts, where `expert_parallel` of the `copies` ranks share them.

    model: the rank's part. `describe` gives the layout of parameters of these sizes on this number of ranks.
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
    """Layout with all of `sizes` on each of `ranks` ranks, which sum gradients.

    once: the step has one backward, so gradients appear one by one; otherwise all are allocated all the time.
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
    sizes: Sizes, at: PlanContext, ranks: int, *, regather: bool, offload: bool, every: bool,
    gathered: Sizes | None = None, half_sums: bool = False,
) -> Layout:  # fmt: skip
    """Layout of torch's FSDP2 with `ranks` ranks to a copy of the model.

    While a block computes, the next one is gathered; parameters outside of blocks stay gathered. `regather`: blocks are
    freed after their forward. `every`: gradients are reduced after every micro batch, not only after the last.
    `gathered`: the model as it is gathered and computes; `half_sums`: gradients are summed in its types.
    """
    mine, trained = share(sizes.parameters, ranks), share(sizes.trainable, ranks)
    rounds, whole = at.batch.accumulation, gathered or sizes
    block, outside = min(sizes.largest_block, sizes.trainable), min(sizes.outside_blocks, sizes.trainable)
    most = whole.outside_blocks + 2 * whole.largest_block if regather else whole.parameters
    waits = rounds > 1 and not every  # all gradients, whole, for the last micro batch
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
        retained_grad_fraction_outside=0.0 if waits else 1.0,  # which are summed last
        gathered=most,
        # A block's gradients are copied before they are sent, while the next block makes its own. When the rest is
        # summed, the shares of all are there.
        gradient_buffers=2 * block,
        step_buffers=max(0, 2 * outside - (sizes.trainable - shares if waits else 0)),
        sent=sent + all_reduced(trained, copies),
        host={"parameters": mine, "gradients": trained} if offload else {},
        optimizer="host" if offload else "device",
    )
