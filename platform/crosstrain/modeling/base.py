"""The base classes of models."""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from crosstrain.modeling.context import Context
from crosstrain.modeling.meta_init import has_values
from crosstrain.modeling.routers import Routers
from crosstrain.modeling.structure import Structure
from crosstrain.modeling.weights import Export, Weights
from crosstrain.utils.types import IGNORE_INDEX, Batch

if TYPE_CHECKING:
    from crosstrain.data.dataset import Dataset

Sums = dict[str, tuple[Any, float]]  # name -> (sum of values, or of loads [groups, n]; sum of counts)


def add_sums(totals: Sums, more: Sums) -> None:
    """Add the sums `more` to `totals`, in place."""
    for name, (total, count) in more.items():
        before = totals.get(name, (0.0, 0.0))
        totals[name] = before[0] + total, before[1] + count


def largest_share(loads: Tensor) -> float:
    """Return the maximum load in a group divided by the mean load in the group, averaged over groups with any load.

    loads: [groups, n].
    """
    used = loads[loads.sum(1) > 0]
    return float((used.amax(1) / used.mean(1)).mean()) if len(used) else 0.0


def no_match(pattern: str, names: Iterable[str]) -> str:
    """Return the error text for a pattern that matches none of the parameter `names`."""
    near = difflib.get_close_matches(pattern, list(names), n=3, cutoff=0.0)
    return f"{pattern!r} matches no parameter; similar names: {', '.join(near)}"


class Model(nn.Module, ABC):
    """Base class of models, which compute the loss of a batch and describe their own parameters and structure.

    `forward` and `blocks` are enough to train under data parallelism, FSDP and ZeRO. `structure`, `weights` and
    `export` describe everything else; a model replaces them if their defaults are not enough. Subclasses wrap a
    library's modules without modifying them.
    """

    takes_positions = False  # True: `forward` takes position_ids and attention_mask; see `LanguageModel.forward`
    routers: Routers | None = None  # routers watched for router losses and expert loads; None: no routers
    context: Context | None = None  # ranks that split the rows of batches with labels; None: no context parallelism

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options
        self.structure, self.weights, self.export = Structure(self), Weights(self), Export(self)
        self._recorded: tuple[dict[str, Any], dict[str, Any]] = ({}, {})  # indexed by `self.training`

    # ---- compute

    @abstractmethod
    def forward(self, **batch: Any) -> Any:
        """Return the sum of the targets' losses, an fp32 scalar, for a batch with targets.

        For a batch without targets, return fp32 logits [batch, vocab_size] of the next token, without padding IDs. The
        caller may pass a `cache` made by `new_cache`; the batch then holds only tokens that are not in the cache.

        If `forward` has the parameter `mode`, callers can request other results; see `ForwardMode`.
        """

    @staticmethod
    def num_targets(batch: Batch) -> int:
        """Number of targets in a batch, counted before any forward.

        A step's loss is divided by the step's number of targets.
        """
        return int((batch["labels"] != IGNORE_INDEX).sum())

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The repeated blocks in order: the units of gradient checkpointing, compilation, sharding and pipelining."""

    def record(self, name: str, values: Tensor, counts: Tensor | None = None) -> None:
        """Add `values`, weighted by `counts` (None: 1 each), to the mean logged as `name`. Call this in `forward`.

        The mean is over the micro batches and ranks of all steps since the last logged step. Validation and evaluation
        report a separate mean over their samples as val_NAME.
        """
        if has_values(values):
            counts = torch.ones_like(values) if counts is None else counts
            sums: tuple[Any, Any] = (values.detach() * counts).double().sum(), counts.double().sum()
            add_sums(self._recorded[self.training], {name: sums})

    def record_load(self, name: str, counts: Tensor) -> None:
        """Add load counts [groups, n], such as tokens per expert; the log shows `max / mean`, averaged over groups."""
        if has_values(counts):
            add_sums(self._recorded[self.training], {name: (counts, 1.0)})

    # ---- tokens

    @property
    def vocab_size(self) -> int | None:
        """Number of token IDs, without padding; None: the model has no vocabulary."""
        return None

    @property
    def predicts_tokens(self) -> bool:
        """True for a language model: perplexity is then reported. Default: True if the model has a vocabulary."""
        return self.vocab_size is not None

    @property
    def targets(self) -> str:
        """Unit of `num_targets`, such as tokens; perplexity is reported only if the unit is tokens."""
        return "tokens" if self.predicts_tokens else "targets"

    @property
    def max_length(self) -> int | None:
        """Maximum sequence length in tokens; None: no limit."""
        return None

    def new_cache(self) -> Any:
        """Return an empty key/value cache for generation; None if the model has no cache."""
        return None

    def check_dataset(self, dataset: "Dataset") -> None:
        """Raise ConfigError if the model cannot process the dataset's samples. The platform checks IDs and lengths."""

    # ---- for the platform

    def take_recorded(self) -> Sums:
        """Return and clear this rank's recorded sums for the model's current mode, training or evaluation."""
        found: Sums = {}
        for model in (module for module in self.modules() if isinstance(module, Model)):
            seen = model._recorded[self.training]
            for name, (total, count) in seen.items():
                add_sums(found, {name: (float(total) if total.ndim == 0 else total.cpu(), float(count))})
            seen.clear()
        return found


class LanguageModel(Model):
    """A causal language model that also accepts embeddings as input, so that other models can insert vectors."""

    @abstractmethod
    def forward(self, **batch: Any) -> Tensor:
        """Implement `Model.forward` for `input_ids` [batch, length] or `inputs_embeds` [batch, length, hidden_size].

        Optional arguments:

        - labels: [batch, length], the target at each position, or -100.
        - cache: see `Model.forward`.
        - attention_mask: [batch, past + length], nonzero where visible; or a boolean or additive mask
          [batch, 1, length, past + length]. Default: all earlier positions are visible.
        - position_ids: [batch, length]. Default: positions counted from the start of the sequence.
        """

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [*, hidden_size] of token IDs [*]."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Width of an embedding."""
