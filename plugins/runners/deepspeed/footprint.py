"""Memory and traffic of a rank under ZeRO, for memory plans, and the dtypes in which ZeRO communicates.

The stages are defined in Rajbhandari et al., 2020 (ZeRO), section 5. DeepSpeed keeps a separate fp32 copy of the
parameters for the optimizer, even if the parameters themselves are fp32.
"""

import copy
from typing import Any

from torch import nn

from crosstrain import Layout, Model, PlanContext, RunOptions, Sizes, all_reduced, scattered
from crosstrain.engine.footprint import data_parallel

from ..sharding import computes_in_half, linear_weights, share

_FP32 = 4
_STAGE_0_BUCKET = 500_000_000  # elements per all-reduce of DeepSpeed's engine without ZeRO


def half_weights(options: Any, run: RunOptions, model: Model) -> list[nn.Parameter]:
    """Return the weights that ZeRO gathers in bf16, because autocast rounds them and their gradients anyway.

    Biases are left out, because DeepSpeed's linear layers do not round them. Below stage 3, frozen weights are left out
    too, because they are never gathered.
    """
    whole = (
        options.stage == 0
        or options.stage3_use_all_reduce_for_fetch_params
        # With offloading, gradient sums have the weights' dtype.
        or (options.stage < 3 and options.offloads_optimizer)
    )
    if options.param_dtype != "amp" or whole or not computes_in_half(run, model):
        return []
    return [
        p
        for p in linear_weights(model)
        if len(getattr(p, "ds_shape", p.shape)) > 1 and (options.stage == 3 or p.requires_grad)
    ]


def layout(options: Any, at: PlanContext) -> Layout:
    """Return the layout of every rank under the runner's options."""
    if options.stage == 0:
        plain = data_parallel(at)
        plain.step_buffers = min(Sizes.of(at.model).trainable, _STAGE_0_BUCKET * _FP32)
        return plain
    model, all_half = copy.deepcopy(at.model), options.param_dtype == "bf16"
    lowered = list(model.parameters()) if all_half else half_weights(options, at.run, model)
    for p in lowered:
        p.data = p.data.bfloat16()
    in_memory = bool(lowered) and (all_half or options.stage < 3)  # amp at stage 3 affects only communication
    describe = _stage3 if options.stage == 3 else _stage12
    out = describe(options, at, Sizes.of(model if in_memory else at.model), Sizes.of(model))
    if in_memory:
        out.model, out.computes, out.autocast = model, f"weights in bf16, {options.param_dtype}", not all_half
    return out


def _stage12(options: Any, at: PlanContext, sizes: Sizes, sent: Sizes) -> Layout:
    ranks, rounds, elements = at.world_size, at.batch.accumulation, sizes.trainable_elements
    gradients, masters = elements * _width(options), share(elements * _FP32, ranks)
    part, partitioned = share(gradients, ranks), options.stage == 2
    half = sent.trainable < elements * _FP32
    once = options.reduce_scatter and (half or not options.use_multi_rank_bucket_allreduce)
    sums = scattered(gradients, ranks) if once else all_reduced(gradients, ranks)
    # Stage 2 reduces gradients and keeps this rank's part after each micro batch; stage 1 reduces after the last one.
    waiting = 0 if rounds == 1 else part if partitioned else gradients
    bucket = _buckets(options, gradients, at, 2 if options.overlap_comm else 1)
    # The bucket stays allocated until the step. On a CPU, the bucket's pages take memory only once they are written.
    always = at.device != "cpu" or (partitioned and rounds > 1)
    offloads = options.offloads_optimizer
    return Layout(
        parameters=sizes.parameters,
        held=sizes.elements,
        updated=share(elements, ranks),
        gradients=0 if partitioned and offloads else waiting,
        retained_grad_fraction=1 / ranks if rounds == 1 and not offloads else 0.0,
        masters=masters,
        buffers=bucket if always else 0,
        gradient_buffers=0 if always else bucket,
        # The gradient bucket, the flattened gradients, and the optimizer's temporary tensor for one flat group.
        step_buffers=bucket + (0 if offloads else part + masters),
        sent=sums * (rounds if partitioned else 1) + scattered(sent.trainable, ranks),
        host={"gradients": masters} if offloads else {},
        optimizer="host" if offloads else "device",
    )


def _stage3(options: Any, at: PlanContext, sizes: Sizes, sent: Sizes) -> Layout:
    ranks, rounds, mine = at.world_size, at.batch.accumulation, share(sizes.parameters, at.world_size)
    elements = share(sizes.trainable_elements, ranks)
    part, whole = elements * _width(options), sizes.trainable_elements * _width(options)
    offloads = options.offloads_optimizer
    where = {"none": "device", "cpu": "host", "nvme": "disk"}[options.offload_optimizer.device if offloads else "none"]
    parameters = options.offload_param.device if options.offload_param is not None else "none"
    return Layout(
        parameters=mine if parameters == "none" else 0,
        held=share(sizes.elements, ranks),
        updated=elements,
        gradients=0 if offloads else part,
        masters=elements * _FP32,
        # Parameters up to this total size stay gathered, because they are soon used again.
        gathered=min(sizes.parameters, int(options.stage3_max_live_parameters) * _FP32),
        buffers=_buckets(options, whole, at, 1),
        # An upper bound: parameters that stay gathered after the forward are not gathered again for the backward.
        sent=rounds * (2 * scattered(sent.parameters, ranks) + scattered(whole, ranks)),
        host=({"parameters": mine} if parameters == "cpu" else {}) | ({"gradients": part} if offloads else {}),
        optimizer=where,  # type: ignore[arg-type]
    )


def _width(options: Any) -> int:
    """Return the bytes per element of stored gradients."""
    return 2 if options.param_dtype == "bf16" else _FP32


def _buckets(options: Any, gradients: int, at: PlanContext, count: int) -> int:
    """Return the bytes of `count` gradient buckets; on a CPU, pages that are never written take no memory."""
    buckets = count * int(options.reduce_bucket_size) * _width(options)
    return min(buckets, gradients) if at.device == "cpu" else buckets
