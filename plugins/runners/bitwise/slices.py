"""Sequences computed as a fixed number of slices, so that the degree of context parallelism changes no bit.

A module with parameters computes each slice on its own, and the gradients of its parameters are summed over the slices
in a fixed tree. Of c context-parallel ranks, each has consecutive slices; a rank without context parallelism has all
of them. Attention has whole sequences, and each rank computes some of its heads.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crosstrain import ConfigError, ForwardMode, Group, Head, Logits, Model
from crosstrain.modeling.context import Context

from .units import Contiguous, Draws, Enter, Leave, check_rates, check_vectors


def check_slices(model: Model, count: int) -> None:
    """Raise ConfigError if the modules of a model cannot compute the slices of a sequence on their own."""
    try:
        model.structure.check_context(count)
    except ConfigError as error:
        raise ConfigError(f"run.bitwise.slices needs a model that supports context parallelism: {error}") from None
    special = model.structure.experts(), model.structure.by_document(), model.structure.reads_across
    if model.structure.ends() is None or any(special):
        raise ConfigError(
            "run.bitwise.slices: only language models without experts, recurrent layers and DoRA can compute slices of "
            "a sequence on their own; leave slices out"
        )
    check_rates(
        model,
        dict(model.named_modules()),
        "slices",
        "only dropout of attention and of modules can be drawn for each slice",
    )


class _WholeHeads(Context):
    """A context whose ranks compute the same heads as one process."""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if key.shape[1] % self.size:
            raise ConfigError(f"run.bitwise: context_parallel={self.size} does not divide {key.shape[1]} key heads")
        return super().to_heads(query, key, value)

    def whole(self, x: Tensor) -> Tensor:
        raise ConfigError(f"run.bitwise: context_parallel={self.size} does not divide the number of attention heads")


class Slices:
    """The `count` slices of this rank's part of each sequence; `ranks` have the other parts."""

    def __init__(self, count: int, ranks: Group) -> None:
        self.count, self.draws = count, Draws(count, ranks.rank * count)
        self._shared: dict[tuple[Tensor, bool], tuple[Tensor, ...]] = {}  # views of parameters used more than once
        self._length: int | None = None  # tokens of this rank in the forward, from its first module

    def compute(self, model: Model, draws_heads: bool) -> None:
        """Make the modules of a model compute each slice on its own.

        draws_heads: attention draws its dropout for as many parts of the heads as there are slices.
        """
        self._width = model.hidden_size
        if draws_heads:
            self.draws.of_attention(model, model.modules())
        if model.context is not None:
            model.context = _WholeHeads(model.context.group)
        model.register_forward_pre_hook(self._begin)
        uses = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
        for module in model.modules():
            own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
            shared = {name for name, parameter in own.items() if uses[parameter] > 1}
            if own or isinstance(module, nn.Dropout):
                module.forward = partial(self._each, module, shared, module.forward)

    def _begin(self, *_: Any) -> None:
        self._shared.clear()
        self._length = None

    def views(self, parameter: Tensor | None, shared: bool = True) -> tuple[Tensor | None, ...]:
        """Return a view of a parameter for each slice.

        shared: the parameter has several uses, whose gradients are added in each slice first.
        """
        if parameter is None:
            return (None,) * self.count
        key = parameter, torch.is_grad_enabled()  # a block that is recomputed has had a forward without gradients
        found = self._shared.get(key) or Enter.apply(parameter, self.count, None)
        if shared:
            self._shared[key] = found
        return found

    def cut(self, x: Any) -> list[Any]:
        """Return the slices of a tensor [batch, length, *]; of a different value, the value for each slice."""
        return [part.contiguous() for part in x.chunk(self.count, 1)] if isinstance(x, Tensor) else [x] * self.count

    def _each(
        self, module: nn.Module, shared: set[str], forward: Callable[..., Tensor], x: Tensor, *others: Any
    ) -> Tensor:
        self._length = self._length or x.shape[1]
        if x.shape[1] % self.count and not torch.is_grad_enabled():
            return forward(x, *others)
        if x.shape[1] != self._length or self._length % self.count:
            raise ConfigError(
                f"run.bitwise.slices: {type(module).__name__} gets a tensor of shape {tuple(x.shape)}, but its second "
                f"dimension must be tokens whose number is a multiple of slices; set the length of the dataset's "
                f"sequences to one, or leave slices out"
            )
        own, inputs = module._parameters, [self.cut(value) for value in (x, *others)]
        views = {name: self.views(parameter, name in shared) for name, parameter in own.items()}
        drops = isinstance(module, nn.Dropout) and module.training and module.p
        outputs = []
        try:
            for index in self.draws.apart() if drops else range(self.count):
                module._parameters = {name: of_slice[index] for name, of_slice in views.items()}
                outputs.append(Contiguous.apply(forward(*[value[index] for value in inputs]), None))
        finally:
            module._parameters = own
        if outputs[0].shape[-1] >= self._width:  # narrower outputs, such as an adapter's, are not activated
            check_vectors(outputs[0], "slices")
        return torch.cat(outputs, 1)


class SlicedHead(Head):
    """A head that computes the loss of each slice on its own, as `head` does."""

    def __init__(self, slices: Slices, head: Head) -> None:
        self.slices, self.head = slices, head

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        labels: Tensor | None,
        vocab_size: int,
        logits: Logits,
        mode: ForwardMode,
    ) -> Tensor:
        if labels is None or mode.reduce is not None or labels.shape[1] % self.slices.count:
            return self.head(hidden, weight, labels, vocab_size, logits, mode)
        losses = []
        given = self.slices.cut(hidden), self.slices.views(weight), self.slices.cut(labels)
        for part, of_slice, targets, bias in zip(*given, self.slices.views(logits.bias), strict=True):
            losses.append(self.head(part, of_slice, targets, vocab_size, replace(logits, bias=bias), mode))
        return Leave.apply(None, *losses)
