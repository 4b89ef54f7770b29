"""Functions for runners that shard parameters: a check of optimizers, weights to send in bf16, memory plans."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from crosstrain import ConfigError, Layout, MakeOptimizer, Model, PlanContext, RunOptions, Sizes, all_reduced, scattered


def check_elementwise(make_optimizer: MakeOptimizer) -> None:
    """Raise ConfigError unless the optimizer is elementwise, for runners that split parameters.

    The check runs the optimizer: updating a matrix must give the same values as updating its two halves separately.
    """
    numbers = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(0))

    def moved(cut: Callable[[Tensor], Sequence[Tensor]]) -> Tensor:
        parameters = [nn.Parameter(part.clone()) for part in cut(numbers[0])]
        optimizer = make_optimizer(((str(i), p) for i, p in enumerate(parameters)), lambda _: numbers[0].shape)
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        for gradient in numbers[1:]:
            for p, part in zip(parameters, cut(gradient), strict=True):
                p.grad = part.clone()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in parameters])

    if not torch.allclose(moved(lambda t: [t]), moved(lambda t: t.flatten().split(8)), rtol=1e-5):
        raise ConfigError(
            "run.optimizer: it needs whole parameters, but the runner shards them; use an optimizer such as adamw or "
            "muon, or a runner such as ddp"
        )


def linear_weights(model: Model) -> list[nn.Parameter]:
    """Return the parameters of the linear layers in blocks; autocast rounds them before each use."""
    layers = [module for block in model.blocks() for module in block.modules() if is_linear(module)]
    return [parameter for layer in layers for parameter in layer.parameters(recurse=False)]


def is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D  # imported here so that runners load without transformers

    return isinstance(module, (nn.Linear, Conv1D))


def computes_in_half(run: RunOptions, model: Model) -> bool:
    """Return True if only bf16 matmuls read the weights of linear layers, so the weights may be rounded in advance."""
    in_bf16 = (run.amp.dtype, run.amp.linear, run.compile) == ("bf16", None, "none")
    return in_bf16 and not (model.structure.reads_across or model.weights.quantized())


def reshard(model: nn.Module) -> None:
    """Free all parameters that FSDP2 has gathered, so that the model has its shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def share(size: int, ranks: int) -> int:
    """Return the size of the largest of `ranks` parts: `size / ranks`, rounded up."""
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
    """Return the layout under torch's FSDP2, if `ranks` ranks share a copy of the model.

    While a block computes, the next block is gathered; parameters outside of blocks stay gathered. `regather`: blocks
    are freed after their forward. `every`: gradients are reduced after every micro batch, not only after the last.
    `gathered`: sizes of the gathered parameters, in their compute dtypes; None: use `sizes`. `half_sums`: gradients are
    summed in the dtypes of `gathered`.
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
        retained_grad_fraction_outside=0.0 if waits else 1.0,  # gradients outside of blocks are reduced last
        gathered=most,
        # A block's gradients are copied for the reduce-scatter while the next block computes its own. All gradient
        # shards are allocated by the time the gradients outside of blocks are reduced.
        gradient_buffers=2 * block,
        step_buffers=max(0, 2 * outside - (sizes.trainable - shares if waits else 0)),
        sent=sent + all_reduced(trained, copies),
        host={"parameters": mine, "gradients": trained} if offload else {},
        optimizer="host" if offload else "device",
    )
