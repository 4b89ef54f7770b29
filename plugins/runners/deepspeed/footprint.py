"""Memory and traffic of a rank under ZeRO, for the plan.

The stages are those of Rajbhandari et al., 2020 (ZeRO), section 5. DeepSpeed keeps the optimizer's fp32 parameters as a
copy of their own also where parameters are fp32 already, as they are here.
"""

from typing import Any

from crosstrain import Layout, PlanContext, Sizes
from crosstrain.engine.footprint import all_reduced, data_parallel, scattered, share

_FP32 = 4
_STAGE_0_BUCKET = 500_000_000  # elements that DeepSpeed's engine sums at once without ZeRO


def layout(options: Any, at: PlanContext) -> Layout:
    """The layout of every rank under the runner's options."""
    if options.stage == 0:
        plain = data_parallel(at)
        plain.step_buffers = min(Sizes.of(at.model).trainable, _STAGE_0_BUCKET * _FP32)
        return plain
    return (_stage3 if options.stage == 3 else _stage12)(options, at)


def _stage12(options: Any, at: PlanContext) -> Layout:
    sizes, ranks, rounds = Sizes.of(at.model), at.world_size, at.batch.accumulation
    part, elements = share(sizes.trainable, ranks), share(sizes.trainable_elements, ranks)
    partitioned = options.stage == 2
    sums = scattered(sizes.trainable, ranks) if options.reduce_scatter else all_reduced(sizes.trainable, ranks)
    # Of a gradient that is in the bucket this rank keeps its part; stage 1 sums after the last micro batch alone.
    waiting = 0 if rounds == 1 else part if partitioned else sizes.trainable
    bucket = _buckets(options, sizes, at, 2 if options.overlap_comm else 1)
    # It is there until the step; on a CPU, from when something is written to it.
    always = at.device != "cpu" or (partitioned and rounds > 1)
    offloads = options.offloads_optimizer
    out = Layout(
        parameters=sizes.parameters,
        held=sizes.elements,
        updated=elements,
        gradients=0 if partitioned and offloads else waiting,
        retained_grad_fraction=1 / ranks if rounds == 1 and not offloads else 0.0,
        masters=part,
        buffers=bucket if always else 0,
        gradient_buffers=0 if always else bucket,
        # Gradients in the bucket and flattened, and what the optimizer makes of one flat tensor on its way.
        step_buffers=bucket + (0 if offloads else 2 * part),
        sent=sums * (rounds if partitioned else 1) + scattered(sizes.trainable, ranks),
    )
    if offloads:
        out.optimizer, out.host = "host", {"gradients": part}
    return out


def _stage3(options: Any, at: PlanContext) -> Layout:
    sizes, ranks, rounds = Sizes.of(at.model), at.world_size, at.batch.accumulation
    mine, part = share(sizes.parameters, ranks), share(sizes.trainable, ranks)
    elements = share(sizes.trainable_elements, ranks)
    # Gathered parameters stay while fewer than this many are, because they are used again soon.
    live = min(sizes.parameters, int(options.stage3_max_live_parameters) * _FP32)
    offloads, where = options.offloads_optimizer, "device"
    if offloads:
        where = "disk" if options.offload_optimizer.device == "nvme" else "host"
    parameters = options.offload_param.device if options.offload_param is not None else "none"
    out = Layout(
        parameters=mine if parameters == "none" else 0,
        held=share(sizes.elements, ranks),
        updated=elements,
        gradients=0 if offloads else part,
        masters=part,
        gathered=live,
        buffers=_buckets(options, sizes, at, 1),
        # Parameters are gathered for the forward and, unless they stayed, for the backward.
        sent=rounds * (2 * scattered(sizes.parameters, ranks) + scattered(sizes.trainable, ranks)),
        optimizer=where,  # type: ignore[arg-type]
    )
    if parameters == "cpu":
        out.host["parameters"] = mine
    if offloads:
        out.host["gradients"] = part
    return out


def _buckets(options: Any, sizes: Sizes, at: PlanContext, count: int) -> int:
    """Bytes of `count` gradient buckets; on a CPU, pages that are never written take no memory."""
    buckets = count * int(options.reduce_bucket_size) * _FP32
    return min(buckets, sizes.trainable) if at.device == "cpu" else buckets
