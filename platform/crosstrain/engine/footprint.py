"""What a rank holds and sends, as a runner says before any rank exists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from crosstrain.config.batch import BatchPlan
from crosstrain.config.run_options import RunOptions
from crosstrain.modeling.base import Model
from crosstrain.utils.types import Batch


@dataclass(frozen=True)
class Situation:
    """What a runner is asked about: a model on the meta device, frozen as the run freezes it, and where it trains.

    torch's process group is a pretended one of `world_size` ranks, of which this is the first; exchanges do nothing.
    """

    model: Model
    inputs: Batch  # a micro batch on the meta device
    run: RunOptions
    world_size: int
    batch: BatchPlan
    device: str  # cpu or cuda


@dataclass
class Layout:
    """What one rank holds between steps and at the most, and sends in a step. Bytes, but for `updated`.

    The defaults of what is not given are nothing.
    """

    parameters: int  # that stay on the device
    updated: int  # elements that this rank's optimizer updates, of which it keeps state
    held: int  # elements of parameters that this rank keeps between steps, wherever they are
    gradients: int = 0  # that exist all the time while a micro batch is computed
    growing: float = 0.0  # and of each gradient that the backward makes, the share that stays until the step
    growing_outside: float | None = None  # of those of parameters outside of blocks; None: the same
    masters: int = 0  # a second copy of what is updated, for the optimizer; it is where the optimizer's state is
    gathered: int = 0  # parameters of other ranks, at the most
    buffers: int = 0  # of exchanges while micro batches are computed
    gradient_buffers: int = 0  # of exchanges that begin with the first gradient of a backward; with gradients that wait
    step_buffers: int = 0  # of exchanges between the last backward and the end of the step
    sent: int = 0  # in a step, outside of the forward and the backward of blocks, which are traced
    host: dict[str, int] = field(default_factory=dict)  # in host memory, by what it is; without the optimizer's state
    optimizer: Literal["device", "host", "disk"] = "device"  # where the optimizer's state is
    in_flight: int = 1  # micro batches whose activations are kept at the same time
    model: Model | None = None  # what it computes with, if that is not the whole model; on the meta device
    computes: str = ""  # equal ones compute alike, and are traced once
    kind: str = ""  # which of several kinds of rank it is, such as the stage of a pipeline


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parameters by where they are; each parameter counts once."""

    parameters: int
    trainable: int
    trainable_elements: int
    elements: int
    largest_block: int
    outside_blocks: int
    blocks: int  # how many

    @staticmethod
    def of(model: Model) -> Sizes:
        blocks = [numbers(block.parameters()) for block in model.blocks()]
        total, trained = numbers(model.parameters()), numbers(p for p in model.parameters() if p.requires_grad)
        inside = numbers(p for block in model.blocks() for p in block.parameters())[0]
        largest = max((size for size, _ in blocks), default=0)
        return Sizes(total[0], trained[0], trained[1], total[1], largest, total[0] - inside, len(blocks))


def numbers(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Bytes and elements of parameters, each of which counts once."""
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


def data_parallel(at: Situation) -> Layout:
    """Every rank holds everything, and gradients are summed."""
    ranks = at.batch.dp_size
    return replicated(Sizes.of(at.model), ranks, ranks == 1 and at.batch.accumulation == 1)


def replicated(sizes: Sizes, ranks: int, once: bool) -> Layout:
    """All of `sizes` on each of `ranks` ranks, which sum gradients.

    once: a gradient begins in the step's only backward; otherwise all are there all the time.
    """
    return Layout(
        parameters=sizes.parameters,
        held=sizes.elements,
        updated=sizes.trainable_elements,
        gradients=0 if once else sizes.trainable,
        growing=1.0 if once else 0.0,
        sent=all_reduced(sizes.trainable, ranks),
    )


def fully_sharded(sizes: Sizes, at: Situation, ranks: int, *, regather: bool, offload: bool, every: bool) -> Layout:
    """torch's FSDP2 with `ranks` ranks to a copy, blocks one by one and then the rest.

    While a block computes the next one is gathered; what is outside of the blocks stays gathered. `regather`: blocks
    are given back after their forward. `every`: gradients are summed after every micro batch, not after the last alone.
    """
    mine, trained = share(sizes.parameters, ranks), share(sizes.trainable, ranks)
    rounds = at.batch.accumulation
    block, outside = min(sizes.largest_block, sizes.trainable), min(sizes.outside_blocks, sizes.trainable)
    gathered = sizes.outside_blocks + 2 * sizes.largest_block if regather else sizes.parameters
    waits = rounds > 1 and not every  # all gradients, whole, for the last micro batch
    shares = 0 if offload else trained
    copies = at.batch.dp_size // ranks
    sent = scattered(sizes.parameters, ranks) * rounds + scattered(sizes.trainable, ranks) * (rounds if every else 1)
    if regather:
        sent += scattered(sizes.parameters - sizes.outside_blocks, ranks) * rounds
    return Layout(
        parameters=0 if offload else mine,
        held=share(sizes.elements, ranks),
        updated=share(sizes.trainable_elements, ranks),
        gradients=sizes.trainable if waits else shares if every else 0,
        growing=shares / max(sizes.trainable, 1) if not waits and not every else 0.0,
        growing_outside=0.0 if waits else 1.0,  # which are summed last
        gathered=gathered,
        # A block's gradients are copied before they are sent, while the next block makes its own. When the rest is
        # summed, the shares of all are there.
        gradient_buffers=2 * block,
        step_buffers=max(0, 2 * outside - (sizes.trainable - shares if waits else 0)),
        sent=sent + all_reduced(trained, copies),
        host={"parameters": mine, "gradients": trained} if offload else {},
        optimizer="host" if offload else "device",
    )
