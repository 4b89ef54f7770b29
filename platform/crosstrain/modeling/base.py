"""The base classes of models."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from crosstrain.modeling.activation_checkpointing import Mode
from crosstrain.modeling.context import Context
from crosstrain.modeling.meta_init import has_values
from crosstrain.modeling.pretrained import Place, Source
from crosstrain.modeling.routers import Routers
from crosstrain.utils.errors import ConfigError, TrainingError
from crosstrain.utils.types import IGNORE_INDEX, Batch


class Quantized(Protocol):
    """A frozen parameter that is kept in few bits."""

    shape: torch.Size  # logical

    def quantize(self, value: Tensor) -> None:
        """Take the whole value, fp32; called once, after a runner has sharded the model."""


ReadParameter = Callable[[str], Tensor]  # the whole value of a parameter, by its canonical name
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


@dataclass(frozen=True)
class Ends:
    """Names of a model's modules outside of its blocks, including all that have parameters."""

    first: list[str]  # run before the first block
    last: list[str]  # run after the last one; the last of them is the head, whose weight `ForwardMode.output` is given


@dataclass(frozen=True)
class Merge:
    """A parameter that export combines with others, which the exported folder then leaves out."""

    others: tuple[str, ...]  # canonical names
    combine: Callable[..., Tensor]  # of the parameter and the others, all fp32 and whole


def no_match(pattern: str, names: Iterable[str]) -> str:
    """Describe a pattern of parameter names that matches none of `names`."""
    near = difflib.get_close_matches(pattern, list(names), n=3, cutoff=0.0)
    return f"{pattern!r} matches no parameter; names are like {', '.join(near)}"


class Model(nn.Module, ABC):
    """A module that turns a batch into a loss, and describes its parameters and structure.

    Subclasses hold unmodified library modules. *Canonical* names and *logical* shapes are those that Hugging Face uses
    for the same weights. Checkpoints and initial values are keyed by them.
    """

    takes_positions = False  # True: `forward` takes position_ids and attention_mask, see `LanguageModel.forward`
    reads_across = False  # True: modules in a block read weights of others there, which have to be whole
    routers: Routers | None = None  # of a mixture of experts
    context: Context | None = None  # ranks that share the rows of a batch with targets
    image_size: tuple[int, int] | None = None  # height and width of the images that it takes

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options
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

    def check_documents(self) -> None:
        """Raise ConfigError unless `forward` keeps the documents of a sequence apart, which position_ids number."""
        raise ConfigError(f"model: {type(self).__name__} cannot keep the documents of a sequence apart")

    def check_context(self, ranks: int) -> None:
        """Raise ConfigError unless `forward` can share rows in a `context`, and heads of attention among `ranks`."""
        raise ConfigError(f"run.runner.context_parallel: {type(self).__name__} cannot share a sequence among ranks")

    # ---- structure

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The repeated blocks, in order: the unit of gradient checkpointing, compilation, sharding and pipelining."""

    def ends(self) -> Ends | None:
        """Modules before and after the blocks, which some pipeline stages leave out; None: not known.

        A model that has ends calls its blocks in order, each with the previous one's hidden states [batch, length, H]
        as first argument and result, and closes with `ForwardMode.output`.
        """
        return None

    def experts(self) -> dict[str, Any]:
        """Modules that hold the routed experts of a layer, by the names of `named_modules`; by default none.

        Their own parameters are stacked by expert along the first dimension, `num_experts` of them. They are called
        with hidden states [tokens, width], the numbers of each token's experts [tokens, k] and their weights
        [tokens, k], and compute each token by itself.
        """
        return {}

    def chains(self) -> list[list[nn.Module]]:
        """Lists of blocks that take the previous one's result (a tensor) first; a plan computes few of each list."""
        return [self.blocks()] if self.ends() is not None else []

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Styles of tensor parallelism by pattern of canonical names. Plain data, which YAML can override.

        A pattern (`transformer.h.*.mlp.c_fc`) matches names of parameters, or of modules; others are replicated. The
        styles are the runner's.
        """
        return {}

    @property
    def vocabulary_multiple(self) -> int:
        """Number that divides the rows of embedding and head, with padding, on each rank that holds some of them."""
        return 1

    @abstractmethod
    def canonical_name(self, name: str) -> str:
        """The Hugging Face name of the parameter that `named_parameters` calls `name`."""

    def logical_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """Shape without padding of parameter `name` (canonical), which has `shape` with it."""
        return shape

    def quantized(self) -> Mapping[str, Quantized]:
        """Frozen parameters (canonical names) in another form, which are read from pretrained weights; none."""
        return {}

    @abstractmethod
    def initialize(self, name: str, value: Tensor, rng: torch.Generator) -> None:
        """Fill `value` (fp32, CPU, logical shape) with the initial value of parameter `name` (canonical).

        Must draw from `rng` alone, so that the value depends on nothing but (seed, name, shape).
        """

    def pretrained_weights(self) -> Path | None:
        """Folder of safetensors files under canonical names to start from instead of `initialize`, if any."""
        return None

    def pretrained_name(self, name: str, available: set[str]) -> Place:
        """Name of parameter `name` (canonical) in a pretrained folder that holds the names `available`."""
        return name

    def pretrained_sources(self) -> list[Source]:
        """Every folder that parameters start from, by default `pretrained_weights`; others get initial values."""
        folder = self.pretrained_weights()
        return [] if folder is None else [Source(folder, self.pretrained_name)]

    # ---- training

    def adapted(self) -> Model:
        """The model that `model.adapter` changes: this one, or the language model in it."""
        return self

    def lr_scale(self, name: str) -> float:
        """Factor on the learning rate of the parameter that `named_parameters` calls `name`; of any other, 1."""
        return 1.0

    def hidden_matrices(self) -> set[str]:
        """Names, as `named_parameters` has them, of what optimizers of whole matrices update: matrices of the blocks.

        Embeddings and convolutions are not among them. Names of other parameters than matrices have no effect.
        """
        others = (nn.Embedding, nn.modules.conv._ConvNd)
        inside = {module for block in self.blocks() for module in block.modules() if not isinstance(module, others)}
        return {
            f"{prefix}.{name}" for prefix, module in self.named_modules() if module in inside
            for name, _ in module.named_parameters(recurse=False)
        }  # fmt: skip

    def lighter(self, dtype: str) -> dict[str, str]:
        """Options, by dotted key, that keep frozen parameters in less memory and change no result.

        dtype: of the run's autocast, such as bf16. None by default.
        """
        return {}

    def checkpointing(self, mode: Mode) -> list[tuple[list[nn.Module], Mode]]:
        """Lists of blocks with a mode for each, by default the run's `mode`."""
        return [(self.blocks(), mode)]

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

    # ---- arithmetic

    def flops_per_token(self, sequence_length: int | None) -> float | None:
        """Floating-point operations of forward and backward per token, for the utilisation figure; None: unknown."""
        return None

    @property
    def idle_parameters(self) -> int:
        """Elements of the experts that a token does not choose; 0 in a dense model."""
        return 0

    def memory_formulas(self, micro_batch: int, sequence_length: int | None) -> dict[str, int]:
        """Published estimates of memory for models of this kind: bytes by formula, to compare with the plan."""
        return {}

    # ---- life after training

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

    @abstractmethod
    def save_config(self, folder: Path) -> None:
        """Write the files that a Hugging Face model folder has besides the weights."""

    def save_parts(self, folder: Path, names: set[str], read: ReadParameter) -> None:
        """Write files made of the trained parameters `names` (canonical), which a checkpoint then holds too; none."""

    def parts(self) -> dict[str, Part]:
        """Parts that export can write alone; none."""
        return {}

    def merges(self) -> dict[str, Merge]:
        """Merges that export makes, by canonical name; none by default."""
        return {}

    def new_cache(self) -> Any:
        """A fresh key/value cache for generation, or None where the model keeps none."""
        return None

    # ---- for the platform

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once (a tied one under its first name), by canonical name."""
        return {self.canonical_name(name): parameter for name, parameter in self.named_parameters()}

    def canonical_buffers(self) -> dict[str, Tensor]:
        """Every persistent buffer of floating point, by canonical name; checkpoints hold them as they do parameters."""
        return {
            self.canonical_name(f"{path}.{name}" if path else name): buffer
            for path, module in self.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point()
        }

    def take_recorded(self) -> Sums:
        """Sums of what this rank recorded in the present mode, training or evaluation, since the last call."""
        found: Sums = {}
        for model in (module for module in self.modules() if isinstance(module, Model)):
            seen = model._recorded[self.training]
            for name, (total, count) in seen.items():
                add_sums(found, {name: (float(total) if total.ndim == 0 else total.cpu(), float(count))})
            seen.clear()
        return found

    def all_routers(self) -> list[Routers]:
        """The routers of the model and of those in it."""
        return [m.routers for m in self.modules() if isinstance(m, Model) and m.routers is not None]


def override(model: Model, methods: type[nn.Module]) -> None:
    """Put `methods`, a class of overrides, before the methods of one model, in place."""
    model.__class__ = type(type(model).__name__, (methods, type(model)), {})


# Beginnings of a part's canonical names, and a model, without whose one beginning export writes them; without a model
# they, and the configuration, are as in the whole.
Part = tuple[tuple[str, ...], Model | None]


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
