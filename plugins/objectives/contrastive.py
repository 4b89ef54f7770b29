"""Text embeddings: a contrastive loss with the negatives of all micro batches and ranks."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crosstrain import (
    PLAIN,
    Batch,
    ConfigError,
    ForwardMode,
    Head,
    Logits,
    Policy,
    PositiveFloat,
    Step,
    registry,
)

from .preference import OfPairs
from .reward_model import last_targets


class _Embedding(Head):
    """A head that returns the normalized hidden state at the last target of each row: the row's embedding."""

    def __call__(
        self, hidden: Tensor, weight: Tensor | None, labels: Tensor | None, vocab_size: int, logits: Logits,
        mode: ForwardMode,
    ) -> Tensor:  # fmt: skip
        assert labels is not None
        rows = torch.arange(len(hidden), device=hidden.device)
        return nn.functional.normalize(hidden[rows, last_targets(labels)[:, 0]].float(), dim=-1)


@dataclass(frozen=True)
class _Pulled(_Embedding):
    """A head whose loss has the gradient `pull` [rows, H] with respect to the embeddings, and the value `value`."""

    pull: Tensor
    value: Tensor

    def __call__(self, *given: Any) -> Tensor:
        linear = (super().__call__(*given) * self.pull).sum()
        return linear + (self.value - linear).detach()


@registry.register_objective("info_nce")
class InfoNCE(OfPairs):
    """Contrastive loss of queries and documents (van den Oord et al., 2018); rows 2 i and 2 i + 1 are a pair.

    The embedding of a row is its normalized last hidden state. The negatives of a query are the documents of the whole
    step, on all ranks. As in GradCache (Gao et al., 2021), all embeddings are computed first, without a graph; the loss
    gives their gradients, and each micro batch is then computed once more to carry its part back into the model.
    """

    @dataclass
    class Options:
        """The similarity."""

        temperature: PositiveFloat = 0.05  # divides cosine similarities
        both_ways: bool = True  # also choose the query of each document

    options: Options
    fields = ("preferred", "pull", "value")

    def begin_step(self, step: Step, policy: Policy) -> Step:
        own = [policy.outputs(micro.data, ForwardMode(head=_Embedding())) for micro in step]
        if own[0].ndim != 2:  # the runner has a head of its own
            raise ConfigError("run.runner: info_nce needs whole models on every rank; use ddp, fsdp or a zero runner")
        parts = policy.all_gather({micro.numbers: rows for micro, rows in zip(step, own, strict=True)})
        everyone = {numbers: rows for part in parts for numbers, rows in part.items()}
        order = sorted(everyone)  # the same on every rank
        found = torch.cat([everyone[numbers] for numbers in order]).requires_grad_()
        with torch.enable_grad():
            losses = self.losses(found[0::2], found[1::2])
            (gradient,) = torch.autograd.grad(losses.sum(), found)
        self.record("accuracy", (found[0::2] @ found[1::2].T).argmax(1).eq(torch.arange(len(found) // 2)).float())
        starts = dict(zip(order, itertools.accumulate((len(everyone[n]) for n in order), initial=0), strict=False))
        for micro, rows in zip(step, own, strict=True):
            start, stop = starts[micro.numbers], starts[micro.numbers] + len(rows)
            micro.data = micro.data | {
                "pull": gradient[start:stop],
                "value": losses[start // 2 : stop // 2].sum().detach(),
            }
        return step

    def losses(self, queries: Tensor, documents: Tensor) -> Tensor:
        """Return the loss [pairs] of embeddings [pairs, H]."""
        similarities = queries @ documents.T / self.options.temperature
        right = torch.arange(len(queries), device=queries.device)
        forth = nn.functional.cross_entropy(similarities, right, reduction="none")
        if not self.options.both_ways:
            return forth
        return (forth + nn.functional.cross_entropy(similarities.T, right, reduction="none")) / 2

    def inputs(self, batch: Batch, mode: ForwardMode = PLAIN) -> dict[str, Any]:
        if mode == PLAIN and "pull" in batch:
            mode = ForwardMode(head=_Pulled(batch["pull"], batch["value"]))
        return super().inputs(batch, mode)
