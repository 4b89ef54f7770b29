"""Memory and traffic of ranks that hold shards of the parameters, for `crosstrain plan`."""

from collections.abc import Callable

from crosstrain import Layout, Model, PlanContext, Sizes
from crosstrain.engine.footprint import all_reduced, scattered

# Fields of Layout that are sums over the parameters, so that layouts of two sets of parameters can be added.
_SUMS = (
    "parameters", "updated", "held", "gradients", "masters", "gathered", "buffers", "gradient_buffers", "step_buffers",
    "sent",
)  # fmt: skip


def share(size: int, ranks: int) -> int:
    """Size of the largest of `ranks` parts: `size / ranks`, rounded up."""
    return -(-size // ranks)


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
