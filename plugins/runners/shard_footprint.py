"""Memory and traffic of ranks that hold shards of the parameters, for `crosstrain plan`."""

from crosstrain import Layout, PlanContext, Sizes
from crosstrain.engine.footprint import all_reduced, scattered


def share(size: int, ranks: int) -> int:
    """Size of the largest of `ranks` parts: `size / ranks`, rounded up."""
    return -(-size // ranks)


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
