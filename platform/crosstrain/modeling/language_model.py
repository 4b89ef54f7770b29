"""What a language model owes a model that is built around it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from crosstrain.modeling.base import Model


class LanguageModel(Model):
    """A causal language model that takes embeddings in place of tokens, so that others can put theirs among them."""

    @abstractmethod
    def forward(self, **batch: Any) -> Tensor:
        """As `Model.forward`, of either `input_ids` [batch, length] or `inputs_embeds` [batch, length, hidden_size].

        Also takes, each of them optional: `labels` [batch, length], the target at each position or -100; `cache`;
        `attention_mask`, [batch, past + length] and nonzero for what may be seen, or boolean or additive
        [batch, 1, length, past + length], by default all earlier positions; `position_ids` [batch, length], by
        default counted from the start.
        """

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings [*, hidden_size] of tokens [*]."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Width of an embedding."""
