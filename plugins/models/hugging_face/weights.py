"""The weights of transformers' causal language models: names, initial values and places in published folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from crosstrain import Weights
from crosstrain.modeling.pretrained import Place, Stack

from . import internals

if TYPE_CHECKING:
    from .base import TransformersModel

# Stacked expert weight -> names of its parts in a single MLP: first those of most families, then Mixtral's.
_EXPERT_PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}


def published_experts(name: str, available: set[str], experts: int) -> Place | None:
    """Find an expert parameter in a published folder, stacked or as one tensor per expert; None if it is absent."""
    for published in (name, name.replace(".mlp.", ".block_sparse_moe.")):
        stem, _, own = published.rpartition(".experts.")
        for parts in _EXPERT_PARTS.get(own, ()) if stem else ():
            names = [tuple(f"{stem}.experts.{n}.{part}.weight" for part in parts) for n in range(experts)]
            if names and available.issuperset(names[0]):
                return Stack(tuple(names))
        if published in available:
            return published
    return None


class TransformersWeights(Weights):
    """Uses transformers' names and initial values, and pads the vocabulary."""

    model: TransformersModel

    def __init__(self, model: TransformersModel) -> None:
        super().__init__(model)
        lm = model.lm
        self.vocabulary_multiple = model.options.make_vocab_size_divisible_by
        # The bias of a head may be registered under two tied names.
        words = (lm.get_input_embeddings(), lm.get_output_embeddings())
        rows = {id(p) for module in words if module is not None for p in module.parameters(recurse=False)}
        self._vocabulary = {n for n, p in lm.named_parameters(remove_duplicate=False) if id(p) in rows}

    def canonical_name(self, name: str) -> str:
        return name.removeprefix("lm.")

    def logical_shape(self, name: str, shape: torch.Size) -> torch.Size:
        return torch.Size((self.model.vocab_size, *shape[1:])) if name in self._vocabulary else shape

    def initialize(self, name: str, value: Tensor, rng: torch.Generator) -> None:
        """Fill `value` with transformers' initial value."""
        internals.initialize(self.model.skeleton, name, value, rng)

    def folder(self) -> Path | None:
        return self.model.source

    def place(self, name: str, available: set[str]) -> Place:
        """Return the name with or without the base model's prefix (GPT-2 has none); experts may be separate tensors."""
        short = name.removeprefix(f"{self.model.lm.base_model_prefix}.")
        return name if name in available else published_experts(name, available, self.model.num_experts) or short
