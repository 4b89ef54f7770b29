"""Memory and traffic of ranks under the megatron runner.

The model is sharded and split into stages as in training.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from crosstrain import Head, Layout, Model, PlanContext, Sizes, replicated, scattered

from ..sharding import fully_sharded, share
from .data_parallel import MIB
from .expert_parallel import ExpertParallel
from .options import Options
from .pipeline import StubHead, replace_modules, spread, stubs, width_of
from .plan import ShardSpec, ends_of, resolve
from .rng_tracker import RngTracker
from .schedules import bubble, in_flight
from .tensor_parallel import ParallelHead, TensorParallel, shard_model

# Fields of Layout that are sums over the parameters, so that layouts of two sets of parameters can be added.
_SUMS = (
    "parameters", "updated", "held", "gradients", "masters", "gathered", "buffers", "gradient_buffers", "step_buffers",
    "sent",
)  # fmt: skip


def layouts(options: Options, at: PlanContext) -> list[Layout]:
    """Return the layouts of the first rank of a pipeline (most activations) and of the last rank (with the head)."""
    tensor = None
    if options.tensor_parallel > 1:
        tensor = TensorParallel(
            dist.new_group(list(range(options.tensor_parallel))),
            options.sequence_parallel,
            RngTracker(torch.device("cpu"), 0),
        )
    return [_layout(options, at, tensor, rank) for rank in dict.fromkeys((0, options.pipeline_parallel - 1))]


def _layout(options: Options, at: PlanContext, tensor: TensorParallel | None, rank: int) -> Layout:
    model, stages = copy.deepcopy(at.model), options.stages
    cuts: dict[str, ShardSpec] = {}
    mine, hidden, head = options.stages_of(rank), 0, Head()
    is_first, is_last = 0 in mine, stages - 1 in mine
    if (experts := options.expert_parallel) > 1:
        ExpertParallel(dist.new_group(list(range(experts)))).shard(model)
    if tensor is not None:
        plan = resolve(model, options.plan)
        cuts = shard_model(model, plan, tensor, None)
        tensor.has_dropout = False  # tensors have no values, so no random numbers are drawn
        head = ParallelHead(tensor, has_slice="vocabulary" in plan.modules.values())
    first, last = model.structure.decoder_blocks()[0], model.structure.decoder_blocks()[-1]
    if stages > 1:
        ends, blocks = ends_of(model, "pipeline_parallel"), model.structure.decoder_blocks()
        ranges = spread(len(blocks), stages, options.pipeline_layers)
        here = [number for stage in mine for number in ranges[stage]]
        first, last = blocks[here[0]], blocks[here[-1]]
        rows, length = at.inputs["input_ids"].shape
        length = length if model.context is None else model.context.share(length)
        parts = options.tensor_parallel if options.sequence_parallel else 1
        hidden = rows * length // parts * width_of(model, ends) * 4
        replace_modules(model, stubs(model, ends, here, is_first, is_last, counts=True))
        if not is_last:
            head = StubHead(tensor)
        if not is_first:
            first.register_forward_pre_hook(partial(_receive, parts), prepend=True)
    if tensor is not None and options.sequence_parallel:
        tensor.hook(model, first if is_first else None, None if is_last else last)
    out = _with_experts(model, at.replicas, experts, lambda sizes, copies: _owned(options, at, sizes, copies))
    out.whole = sum(math.prod(cuts[n].full) if n in cuts else p.numel() for n, p in at.model.named_parameters())
    out.head, out.model = head, model if tensor is not None or stages > 1 or experts > 1 else None
    if out.model is not None:
        cut = options.tensor_parallel, experts, options.sequence_parallel, options.plan
        out.computes = repr((*cut, mine, stages, options.pipeline_layers))
    if stages > 1:
        out.kind = f"stage {' and '.join(str(stage + 1) for stage in mine)} of {stages}"
        _pass(out, options, at, rank, hidden)
    return out


def _with_experts(model: Model, copies: int, expert_parallel: int, describe: Callable[[Sizes, int], Layout]) -> Layout:
    """Return the layout of a rank if groups of `expert_parallel` of the `copies` ranks split the experts.

    model: the rank's part of the model. `describe(sizes, ranks)` returns the layout of parameters that `ranks`
    data-parallel ranks hold.
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


def _receive(parts: int, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pre-hook of a stage's first block: replace its input with hidden states of the size that a stage receives."""
    rows, length, width = inputs[0].shape
    return (torch.zeros(rows, length // parts, width, requires_grad=True), *inputs[1:])


def _owned(options: Options, at: PlanContext, sizes: Sizes, copies: int) -> Layout:
    """Return the layout of the parameters under the chosen data-parallel strategy."""
    if options.data_parallel_style == "fsdp" or options.offload == "cpu":
        return fully_sharded(sizes, at, copies, regather=True, offload=options.offload == "cpu", every=False)
    exchanged = copies > 1
    once = at.batch.accumulation == 1
    bucket = min(options.bucket_mb * MIB, sizes.trainable) if exchanged else 0
    out = replicated(sizes, copies, once)
    out.gradient_buffers = bucket
    if options.data_parallel_style == "zero1":
        out.updated = share(sizes.trainable_elements, copies)
        out.retained_grad_fraction += 1 / copies if exchanged and once else 0
        out.step_buffers = 2 * bucket
        out.sent = 2 * scattered(sizes.trainable, copies)
    return out


def _pass(out: Layout, options: Options, at: PlanContext, rank: int, hidden: int) -> None:
    """Add the micro batches in flight, bubble, buffers and traffic of a pipeline to `out`.

    torch keeps one receive buffer per micro batch.
    """
    count = at.batch.accumulation
    out.bubble = bubble(options.pipeline_parallel, options.pipeline_chunks, count)
    out.in_flight = in_flight(options, rank, count)
    others = [other for stage in options.stages_of(rank) for other in (stage - 1, stage + 1)]
    neighbours = sum(0 <= other < options.stages and options.rank_of(other) != rank for other in others)
    out.buffers += neighbours * count * hidden
    out.sent += neighbours * count * hidden
