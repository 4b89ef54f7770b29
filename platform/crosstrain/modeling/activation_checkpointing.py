"""Gradient checkpointing: trade compute or host memory for activation memory.

The four modes work with any model and runner. A block's forward is replaced on the instance, so parameter names and
checkpoints do not change. Dropout draws the same random numbers in the recomputed forward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

Mode = Literal["none", "full", "selective", "offload"]

# Operations that cost the most to recompute per byte of output: matmuls and attention.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.linear.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def apply(blocks: list[nn.Module], mode: Mode) -> None:
    """Replace the forward of every block so that it keeps fewer activations for the backward.

    - full: keep only the block's input; recompute everything else.
    - selective: also keep the outputs of matmuls and attention; recompute the rest.
    - offload: keep the input in host memory and recompute everything else.
    """
    for block in blocks:
        if mode == "full":
            block.forward = partial(_checkpointed, block.forward, noop_context_fn)
        elif mode == "selective":
            contexts = partial(create_selective_checkpoint_contexts, _policy)
            block.forward = partial(_checkpointed, block.forward, contexts)
        elif mode == "offload":
            block.forward = partial(_offloaded, block.forward)


def _checkpointed(forward: Callable[..., Any], contexts: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@torch.compiler.disable  # the compiler cannot trace the inputs' way to host memory
def _offloaded(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # The checkpoint saves its inputs here; what the second forward saves stays on the device.
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return _checkpointed(forward, noop_context_fn, *args, **kwargs)
