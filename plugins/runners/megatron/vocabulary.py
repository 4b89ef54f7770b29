"""The head of a vocabulary-parallel model: the loss without gathered logits, and the next token's logits."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from crosstrain import ForwardMode, Head, Logits, token_cross_entropy

from .tensor_parallel import TensorParallel, local


class ParallelHead(Head):
    """The head for ranks that hold parts of the vocabulary or of the sequence."""

    def __init__(self, tensor: TensorParallel) -> None:
        self.tensor = tensor

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        labels: Tensor | None,
        vocab_size: int,
        logits: Logits,
        mode: ForwardMode,
    ) -> Tensor:
        hidden = self.tensor.taken(hidden)
        if not isinstance(weight, DTensor):
            return super().__call__(self.tensor.whole_sequence(hidden), weight, labels, vocab_size, logits, mode)
        if logits.bias is not None:
            logits = replace(logits, bias=local(logits.bias))
        if labels is not None:
            return token_cross_entropy(
                self.tensor.enter(hidden),
                local(weight),
                labels,
                vocab_size=vocab_size,
                group=self.tensor.group,
                logits=logits,
                **mode.of_loss(),
            )
        mine = torch.nn.functional.linear(hidden[:, -1], local(weight)).float()
        logits.apply_(mine)
        parts = mine.new_empty(self.tensor.size, *mine.shape)
        dist.all_gather_single(parts.flatten(0, 1), mine, group=self.tensor.group)
        return parts.transpose(0, 1).reshape(len(mine), -1)[:, :vocab_size]
