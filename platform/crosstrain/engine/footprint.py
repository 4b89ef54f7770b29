"""Estimates of a rank's memory and communication, computed by a runner before any rank starts."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Literal, Self

from torch import nn

from crosstrain.config.batch import BatchPlan
from crosstrain.config.run_options import RunOptions
from crosstrain.modeling.base import Model
from crosstrain.modeling.forward_mode import Head
from crosstrain.utils.types import Batch


@dataclass(frozen=True)
class PlanContext:
    """A planned run: the model on the meta device, with parameters frozen as in the run, and the number of ranks.

    torch's process group is a fake group of `world_size` ranks; this process is rank 0, and collectives do nothing.
    """

    model: Model
    inputs: Batch  # a micro batch on the meta device
    run: RunOptions
    world_size: int
    batch: BatchPlan
    device: str  # cpu or cuda
    replicas: int  # number of ranks that replicate or shard the same parameters: data-parallel x context-parallel size


@dataclass
class Layout:
    """Memory of one rank, and the bytes that the rank sends in a step. Units are bytes unless commented otherwise."""

    parameters: int  # parameters that stay on the device
    updated: int  # elements that this rank's optimizer updates and keeps state for
    held: int  # parameter elements that this rank keeps between steps, on the device or the host
    whole: int | None = None  # elements of the model over all ranks, with padding; None: the same number as on one rank
    gradients: int = 0  # gradients that stay allocated during the whole micro batch
    retained_grad_fraction: float = 0.0  # fraction of each gradient that is kept from the backward until the step
    retained_grad_fraction_outside: float | None = None  # the same fraction, outside of blocks; None: no difference
    masters: int = 0  # the optimizer's master copy of the parameters, not counted as optimizer state
    gathered: int = 0  # peak memory of parameters gathered from other ranks
    buffers: int = 0  # communication buffers while micro batches are computed
    gradient_buffers: int = 0  # communication buffers that exist after the first gradient, including unsent gradients
    step_buffers: int = 0  # communication buffers between the last backward and the end of the step
    sent: int = 0  # bytes sent in a step; excludes the model's own collectives, because a trace counts them
    host: dict[str, int] = field(default_factory=dict)  # purpose -> host memory, without optimizer state
    optimizer: Literal["device", "host", "disk"] = "device"  # where the optimizer state is kept
    in_flight: float = 1  # number of micro batches with live activations
    bubble: float = 0.0  # fraction of the step in which a rank waits for other pipeline stages
    model: Model | None = None  # this rank's part of the model, on the meta device; None: the whole model
    head: Head | None = None  # this rank's output head; None: the plain head
    autocast: bool = True  # False: this rank's part computes in the dtype of its parameters
    computes: str = ""  # key of the memory trace: layouts with equal keys are traced once
    kind: str = ""  # name of this kind of rank, such as "stage 1 of 4"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model's parameters, in bytes or elements; a tied parameter counts once."""

    parameters: int
    trainable: int
    trainable_elements: int
    elements: int
    largest_block: int
    outside_blocks: int

    @classmethod
    def of(cls, model: Model, among: Container[nn.Parameter] | None = None) -> Self:
        """Return the sizes of all parameters, or only of the parameters in `among`."""

        def some(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
            return [p for p in parameters if among is None or p in among]

        everything = some(model.parameters())
        total, trained = numbers(everything), numbers(p for p in everything if p.requires_grad)
        inside = numbers(p for block in model.blocks() for p in some(block.parameters()))[0]
        largest = max((numbers(some(block.parameters()))[0] for block in model.blocks()), default=0)
        return cls(total[0], trained[0], trained[1], total[1], largest, total[0] - inside)


def numbers(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Return the number of bytes and of elements in parameters; a tied parameter counts once."""
    each = {id(p): p for p in parameters}.values()
    return sum(p.numel() * p.element_size() for p in each), sum(p.numel() for p in each)


def all_reduced(size: int, ranks: int) -> int:
    """Bytes that a rank sends in a ring all-reduce of `size` bytes: 2 (n - 1) / n * size (Patarasuk & Yuan, 2009)."""
    return 2 * size * (ranks - 1) // ranks


def scattered(size: int, ranks: int) -> int:
    """Bytes that a rank sends in an all-gather or reduce-scatter of `size` bytes in total: (n - 1) / n * size."""
    return size * (ranks - 1) // ranks


def data_parallel(at: PlanContext) -> Layout:
    """Layout of plain data parallelism: every rank holds the whole model, and gradients are summed."""
    return replicated(Sizes.of(at.model), at.replicas, once=at.replicas == 1 and at.batch.accumulation == 1)


def replicated(sizes: Sizes, ranks: int, once: bool) -> Layout:
    """Layout of `ranks` ranks that each hold all parameters and sum their gradients.

    once: the step has only one backward, and this backward allocates the gradients one after the other. Otherwise, all
    gradients stay allocated during each micro batch.
    """
    return Layout(
        parameters=sizes.parameters,
        held=sizes.elements,
        updated=sizes.trainable_elements,
        gradients=0 if once else sizes.trainable,
        retained_grad_fraction=1.0 if once else 0.0,
        sent=all_reduced(sizes.trainable, ranks),
    )
