"""The base classes of models."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from crosstrain.modeling.context import Context
from crosstrain.modeling.export import Export
from crosstrain.modeling.meta_init import has_values
from crosstrain.modeling.routers import Routers
from crosstrain.modeling.structure import Structure
from crosstrain.modeling.weights import Weights
from crosstrain.utils.errors import TrainingError
from crosstrain.utils.types import IGNORE_INDEX, Batch

Sums = dict[str, tuple[Any, float]]  # sums of recorded values, or loads [groups, n], and of their counts, by name


def add_sums(totals: Sums, more: Sums) -> None:
    """Add the sums `more` to `totals`, in place."""
    for name, (total, count) in more.items():
        before = totals.get(name, (0.0, 0.0))
        totals[name] = before[0] + total, before[1] + count


def largest_share(loads: Tensor) -> float:
    """The largest of each group's loads [groups, n] over their mean, in the mean over groups that have any."""
    used = loads[loads.sum(1) > 0]
    return float((used.amax(1) / used.mean(1)).mean()) if len(used) else 0.0


def count_targets(count: Callable[[Batch], int], batch: Batch) -> int:
    """Return `count` of a batch, a method of a plugin; TrainingError unless that is an int."""
    try:
        return index(found := count(batch))
    except TypeError as error:
        name = f"{count.__module__}: {count.__qualname__}"
        raise TrainingError(f"{name} has to return the number of targets, an int, not {found!r:.60}") from error


def no_match(pattern: str, names: Iterable[str]) -> str:
    """Describe a pattern of parameter names that matches none of `names`."""
    near = difflib.get_close_matches(pattern, list(names), n=3, cutoff=0.0)
    return f"{pattern!r} matches no parameter; names are like {', '.join(near)}"


class Model(nn.Module, ABC):
    """A module that turns a batch into a loss, and describes its parameters and structure.

    A `forward` and a list of `blocks` are enough to train under data parallelism, FSDP and ZeRO. `structure`,
    `weights` and `export` describe the rest; a model that knows more than their defaults puts its own there. Subclasses
    hold unmodified library modules.
    """

    takes_positions = False  # True: `forward` takes position_ids and attention_mask, see `LanguageModel.forward`
    routers: Routers | None = None  # of a mixture of experts
    context: Context | None = None  # ranks that share the rows of a batch with targets
    image_size: tuple[int, int] | None = None  # height and width of the images that it takes

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options
        self.structure, self.weights, self.export = Structure(self), Weights(self), Export(self)
        self._recorded: tuple[dict[str, Any], dict[str, Any]] = ({}, {})  # in evaluation, in training

    # ---- compute

    @abstractmethod
    def forward(self, **batch: Any) -> Any:
        """Return the sum of the targets' losses, an fp32 scalar, for a batch with targets.

        Without: fp32 logits [batch, vocab_size] of the token that comes next, without padding ids. A `cache` made by
        `new_cache` may be passed along; the batch then holds only the tokens that the cache has not seen.

        A forward with the parameter `mode` is also called for other results, see `ForwardMode`.
        """

    @staticmethod
    def num_targets(batch: Batch) -> int:
        """Target tokens in a batch, counted before any forward: the step's loss is divided by their total."""
        return int((batch["labels"] != IGNORE_INDEX).sum())


    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The repeated blocks, in order: the unit of gradient checkpointing, compilation, sharding and pipelining."""

    def record(self, name: str, values: Tensor, counts: Tensor | None = None) -> None:
        """Add `values`, weighted by `counts` (None: 1 each), to the mean that is logged as `name`; for `forward`.

        The mean is over the micro batches and ranks of all steps since the last logged one. Validation and evaluation
        report another, over their samples, as val_NAME.
        """
        if has_values(values):
            counts = torch.ones_like(values) if counts is None else counts
            seen = self._recorded[self.training]
            total, count = seen.get(name, (0.0, 0.0))
            seen[name] = total + (values.detach() * counts).double().sum(), count + counts.double().sum()

    def record_load(self, name: str, counts: Tensor) -> None:
        """Add `counts` [groups, n] of what was chosen among n; logged is their maximum over their mean, by group."""
        if has_values(counts):
            seen = self._recorded[self.training]
            seen[name] = seen.get(name, (0.0, 0.0))[0] + counts, 1.0

    # ---- tokens

    @property
    def vocab_size(self) -> int | None:
        """Bound of the ids of real tokens."""
        return None

    @property
    def predicts_tokens(self) -> bool:
        """True for a language model, whose loss has a perplexity; by default a model with a vocabulary is one."""
        return self.vocab_size is not None

    @property
    def targets(self) -> str:
        """Noun for what `num_targets` counts; the loss of tokens has a perplexity."""
        return "tokens" if self.predicts_tokens else "targets"

    @property
    def max_length(self) -> int | None:
        """Longest sequence in tokens, if there is a limit."""
        return None

    def new_cache(self) -> Any:
        """A fresh key/value cache for generation, or None where the model keeps none."""
        return None

    # ---- for the platform

    def take_recorded(self) -> Sums:
        """Sums of what this rank recorded in the present mode, training or evaluation, since the last call."""
        found: Sums = {}
        for model in (module for module in self.modules() if isinstance(module, Model)):
            seen = model._recorded[self.training]
            for name, (total, count) in seen.items():
                add_sums(found, {name: (float(total) if total.ndim == 0 else total.cpu(), float(count))})
            seen.clear()
        return found


class LanguageModel(Model):
    """A causal language model that takes embeddings in place of tokens, so that others can put theirs among them."""

    @abstractmethod
    def forward(self, **batch: Any) -> Tensor:
        """Implement `Model.forward` for `input_ids` [batch, length] or `inputs_embeds` [batch, length, hidden_size].

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
