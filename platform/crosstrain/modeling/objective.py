"""The interface of objective plugins: what a step minimises. By default, the targets' cross-entropy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from crosstrain.modeling.base import Model, count_targets
from crosstrain.modeling.forward_mode import PLAIN, ForwardMode, takes_mode
from crosstrain.utils.errors import ConfigError
from crosstrain.utils.types import Batch, MicroBatch, Step


class Policy(Protocol):
    """The model with the weights of this moment, under any runner. Its methods are collective."""

    def generate(
        self, prompts: MicroBatch, n: int, max_new_tokens: int, temperature: float = 1.0, ends: Sequence[int] = ()
    ) -> list[list[int]]:
        """`n` completions of each row of `input_ids`, those of a row together: tokens up to one of `ends`, with it.

        Where the batch has an `attention_mask` [rows, length], a prompt is the tokens that it marks. The random numbers
        depend on the run's seed, the sample's number and the completion only.
        """

    def log_probabilities(self, batch: Batch) -> Tensor:
        """Log-probabilities [rows, length] of the `labels`, 0 elsewhere; fp32 on the CPU, without gradients."""

    def reference_log_probabilities(self, batch: Batch) -> Tensor:
        """The same with the weights that training began with, for an objective that `keeps_reference`."""


class Objective:
    """What a step minimises. `run.objective: {name: ..., <Options>}` chooses and configures one.

    `begin_step` may make the step's samples on the spot. `loss` sees -log p of each target token and the batch, whose
    `fields` the model does not read. Its result is summed over the micro batches and ranks of a step and divided by the
    step's `units`, so that every runner and batch layout minimises the same. The base class is the model's own loss.
    """

    fields: ClassVar[tuple[str, ...]] = ()  # of the batch, which the model does not read
    row_layout: ClassVar[str | None] = None  # `Dataset.row_layout` of the datasets that it takes
    unit: ClassVar[str | None] = None  # noun for what `loss` sums over; None: the model's targets
    # rows, tokens: the field `reference` has log-probabilities that were measured once, before training
    needs_reference: ClassVar[Literal["rows", "tokens"] | None] = None
    keeps_reference: ClassVar = False  # True: `Policy.reference_log_probabilities` can be asked during training
    model: Model

    def __init__(self, options: Any) -> None:
        self.options = options

    # ---- for plugins

    def begin_step(self, step: Step, policy: Policy) -> Step:
        """Return the micro batches to train on, by default those of the dataset; called before targets are counted.

        The number of micro batches stays, and so do their sample numbers.
        """
        return step

    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the units' losses, an fp32 scalar that is differentiable by `losses`.

        losses: fp32 [rows, length], 0 where there is no target; batch: `labels` and the `fields` that the dataset has.
        Shapes alone may decide what is computed: a plan traces this without values.
        """
        return losses.sum()

    def units(self, batch: Batch) -> int:
        """Number of what `loss` sums over, such as pairs; counted before any forward."""
        return self.model.num_targets(batch)

    # A method `token_losses(logits, place, batch)` gives the losses [n] of tokens from their logits [n, vocab_size], in
    # place of -log p; `place` is the slice of these tokens among the rows' tokens, one row after the other.
    token_losses: Callable[..., Tensor] | None = None

    def record(self, name: str, values: Tensor, counts: Tensor | None = None) -> None:
        """Add values to the mean that is logged as `name`; see `Model.record`."""
        self.model.record(name, values, counts)

    # ---- for the platform and runners

    @property
    def is_plain(self) -> bool:
        """True for the model's own loss."""
        return type(self).loss is Objective.loss and self.token_losses is None

    @property
    def makes_samples(self) -> bool:
        """True if the samples of a step are made when it begins, so that those of the dataset have no loss."""
        return type(self).begin_step is not Objective.begin_step

    def attach(self, model: Model) -> None:
        """Take the model that computes. Raises ConfigError for one that this objective does not suit."""
        self.model = model
        if self.is_plain:
            return
        if any(routers.has_loss for routers in model.structure.routers()):
            raise ConfigError("run.objective: a loss of routers is a mean over targets; set model.router_loss=none")
        if not takes_mode(model):
            raise ConfigError(f"run.objective: {type(model).__name__}.forward has no parameter `mode`; give it one")

    def inputs(self, batch: Batch, mode: ForwardMode = PLAIN) -> dict[str, Any]:
        """Arguments with which the model's forward returns `loss`, or the result that `mode` asks for."""
        given = {name: value for name, value in batch.items() if name not in self.fields}
        if "labels" in batch and mode.reduce is None and not self.is_plain:
            mode = replace(mode, reduce=partial(self._reduced, batch=batch))
            if self.token_losses is not None:
                mode = replace(mode, token_losses=partial(self.token_losses, batch=batch))
        return given | mode.arguments()

    def _reduced(self, losses: Tensor, batch: Batch) -> Tensor:
        if self.needs_reference and "reference" not in batch:
            raise ConfigError("run.objective: the reference's log-probabilities are known in training alone")
        return self.loss(losses, batch)

    def num_targets(self, batch: Batch) -> int:
        """`units` of a batch; TrainingError unless that is an int."""
        return count_targets(self.units, batch)

    @property
    def targets(self) -> str:
        """Noun for what `num_targets` counts; the loss of tokens has a perplexity."""
        return self.unit or self.model.targets


def log_probabilities(losses: Tensor) -> Tensor:
    """Log-probability of each row's targets [rows], from their losses [rows, length]."""
    return -losses.sum(1)
