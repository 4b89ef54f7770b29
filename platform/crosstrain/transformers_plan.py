"""What transformers itself says about the structure of its language models, in the platform's terms."""

from __future__ import annotations

from typing import Any

from torch import nn

from crosstrain.model import Ends

# How transformers calls the styles of `Model.tensor_parallel_plan`.
_STYLES = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "summed"}


def tensor_parallel_plan(lm: Any) -> dict[str, str]:
    """The plan of a `...ForCausalLM` by its names, with the vocabulary cut; empty where transformers has none for it.

    Empty, too, where that uses other styles than columns, rows and replicas.
    """
    theirs = lm.config.base_model_tp_plan or {}
    if not theirs or not set(theirs.values()) <= _STYLES.keys():
        return {}
    plan = {f"{lm.base_model_prefix}.{pattern}": _STYLES[style] for pattern, style in theirs.items()}
    words, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    cut = (words,) if words.weight is head.weight else (words, head)
    return plan | {name: "vocabulary" for name, module in lm.named_modules() if module in cut}


def ends(lm: Any, prefix: str) -> Ends | None:
    """What runs before and after the blocks of a `...ForCausalLM` that its owner calls `prefix`; None: not known."""
    theirs = list(lm.config.base_model_pp_plan or {})
    lists = {name for name, module in lm.base_model.named_children() if isinstance(module, nn.ModuleList)}
    blocks = [name for name in theirs if name in lists]
    if len(blocks) != 1:
        return None
    own = [f"{prefix}.{lm.base_model_prefix}.{name}" for name in theirs]
    at = theirs.index(blocks[0])
    head = next(name for name, module in lm.named_modules() if module is lm.get_output_embeddings())
    return Ends(own[:at], [*own[at + 1 :], f"{prefix}.{head}"])
