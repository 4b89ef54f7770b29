"""Layers with a state or a convolution along the sequence, split into the documents of packed rows."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .attention import Documents

# transformers' names in `layer_types` for blocks without attention, and for blocks that also have full attention
FULL_OR_NO_ATTENTION = {"linear_attention", "conv", "moe", "mlp", "hybrid"}


def recurrent_layers(blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the recurrent layers of blocks: in transformers, each begins with a convolution along the sequence."""
    modules = (module for block in blocks for module in block.modules())
    return [module for module in modules if any(isinstance(child, nn.Conv1d) for child in module.children())]


def split_recurrent(blocks: list[nn.Module]) -> bool:
    """Make the recurrent layers of blocks compute each document alone. Returns True if there are such layers."""
    for layer in (layers := recurrent_layers(blocks)):
        layer.forward = partial(_each_apart, layer.forward)
    return bool(layers)


def _each_apart(
    compute: Any, hidden_states: Tensor, *args: Any, documents: Documents | None = None, **kwargs: Any
) -> Tensor:
    """Compute a layer for each document, so that a document begins with an empty state.

    Under context parallelism, hidden_states are this rank's part. Each rank computes whole rows and keeps its part,
    because the state at the start of a part depends on all parts before it.
    """
    if documents is None:
        return compute(hidden_states, *args, **kwargs)
    documents.seen.add(id(compute.__self__))
    kwargs["attention_mask"] = None  # rows with documents have padding only at their ends
    context, rows = documents.context, hidden_states
    if context is not None:
        rows = context.whole(hidden_states[:, None])[:, 0]
    outputs = [compute(rows[row : row + 1, place], *args, **kwargs) for row, place in documents]
    found = torch.cat(outputs, 1).view(rows.shape)
    return found if context is None else found[:, context.place(documents.length)]
