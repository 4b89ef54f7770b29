"""A language model in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crosstrain import Model, PositiveInt, Weights, registry, token_cross_entropy


@registry.register_model("example")
class ExampleModel(Model):
    """A stack of GRUs that predicts the next token."""

    @dataclass
    class Options:
        vocab_size: PositiveInt  # number of token IDs
        hidden_size: PositiveInt = 64  # width of the hidden states
        layers: PositiveInt = 2  # number of blocks

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        size = options.hidden_size
        self.embed = nn.Embedding(options.vocab_size, size)
        self.layers = nn.ModuleList(nn.GRU(size, size, batch_first=True) for _ in range(options.layers))
        self.weights = ExampleWeights(self)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, cache: None = None) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        if labels is None:  # generation: logits of the next token
            return nn.functional.linear(hidden[:, -1], self.embed.weight).float()
        return token_cross_entropy(hidden, self.embed.weight, labels)  # a sum, not a mean

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    @property
    def vocab_size(self) -> int:
        return self.options.vocab_size


class ExampleWeights(Weights):
    """Initial values that differ from torch's defaults."""

    def initialize(self, name: str, value: Tensor, rng: torch.Generator) -> None:
        value.normal_(0.0, 0.1, generator=rng) if value.ndim > 1 else value.zero_()
