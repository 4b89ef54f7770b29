"""Gradient checkpointing: save activation memory at the cost of compute or host memory.

All modes work with any model and runner. A block's forward is replaced on the instance, so parameter names and
checkpoints do not change. When a forward is recomputed, dropout draws the same random numbers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from crosstrain.utils.optional_deps import require

Mode = Literal["none", "full", "selective", "offload"]

# Operations that cost the most to recompute per byte of output: matmuls and attention.
_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.linear.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]

# Marks for the profiler. FSDP's hooks inside a block set more of them in the backward than in the forward, and torch
# then ends the run, as it compares the counts of all other operations.
SAC_IGNORED_OPS.update(
    {torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction}
)


def apply(blocks: list[torch.nn.Module], mode: Mode, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
    """Replace the forward of every block, to keep fewer activations for the backward.

    - full: keep only the block's input; recompute everything else.
    - selective: also keep the outputs of matmuls and attention; recompute the rest.
    - offload: keep the input in host memory and recompute everything else (fairscale's checkpoint wrapper).
    """
    for block in blocks:
        if mode == "offload":
            _offload(block, autocast)
        elif mode != "none":
            contexts = noop_context_fn if mode == "full" else partial(create_selective_checkpoint_contexts, _KEPT)
            block.forward = partial(_checkpointed, block.forward, contexts)


def _checkpointed(forward: Callable[..., Any], contexts: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _offload(block: torch.nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
    wrapper = require("fairscale.nn.checkpoint", "run.gradient_checkpointing=offload")
    wrapper.checkpoint_utils.patch_batchnorm(block)
    # fairscale wraps only modules, so put the block's forward into a module without parameters.
    inside = wrapper.checkpoint_wrapper(_Inside(block.forward, autocast), offload_to_cpu=True)
    trained = any(parameter.requires_grad for parameter in block.parameters())

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        # fairscale does not see the block's parameters, so an input without a gradient would leave them untrained.
        if trained and torch.is_grad_enabled() and args and not args[0].requires_grad:
            args = (args[0].detach().requires_grad_(), *args[1:])
        return inside(*args, **kwargs)

    block.forward = offloaded


class _Inside(torch.nn.Module):
    """A block's forward under autocast; needed because fairscale's recomputation restores autocast only for CUDA."""

    def __init__(self, forward: Callable[..., Any], autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.inner, self.autocast = forward, autocast

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.autocast():
            return self.inner(*args, **kwargs)
