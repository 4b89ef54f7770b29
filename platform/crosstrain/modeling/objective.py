"""The interface of objective plugins: the loss that training minimizes. The default is the targets' cross-entropy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from crosstrain.modeling.base import Model
from crosstrain.modeling.forward_mode import PLAIN, ForwardMode, takes_mode
from crosstrain.utils.errors import ConfigError, TrainingError
from crosstrain.utils.types import Batch, Step

if TYPE_CHECKING:
    from crosstrain.inference.policy import Policy


@dataclass
class Completion:
    """Tokens that a policy sampled, and the log-probability of each token when it was sampled."""

    tokens: list[int]
    log_probabilities: list[float]


class Objective:
    """The loss that training minimizes, configured by `run.objective: {name: ..., <Options>}`.

    `begin_step` may generate the step's samples. `loss` gets -log p of each target token, and the batch with the
    additional `fields` that the model does not read. The losses are summed over the micro batches and ranks of a step
    and divided by the step's `units`, so every runner and batch layout minimizes the same loss. The base class computes
    the model's own loss.
    """

    fields: ClassVar[tuple[str, ...]] = ()  # fields of the batch that are not passed to the model
    row_layout: ClassVar[str | None] = None  # required `Dataset.row_layout`; None: plain samples
    unit: ClassVar[str | None] = None  # name of the terms that `loss` sums, such as pairs; None: `Model.targets`
    # rows, tokens: the batch field `reference` holds log-probabilities per row or token, computed before training
    needs_reference: ClassVar[Literal["rows", "tokens"] | None] = None
    # names of copies of the weights, made before training and saved in checkpoints; see `Policy.keep`
    keeps: Sequence[str] = ()
    model: Model

    def __init__(self, options: Any) -> None:
        self.options = options

    # ---- for plugins

    def begin_step(self, step: Step, policy: "Policy") -> Step:
        """Return the micro batches to train on; default: `step`, from the dataset. Called before targets are counted.

        The number of micro batches and their `numbers` must not change. Validation calls this method with one micro
        batch; `model.training` is then False.

        If several steps train on the same samples (`RolloutOptions.updates_per_rollout`), this method is called before
        each of them, with the step that it returned before, and `step.use` is the number of the earlier ones. After a
        restart between them, `step` is from the dataset although `step.use` is above 0.
        """
        return step

    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the losses of all units (see `units`), an fp32 scalar, differentiable in `losses`.

        losses: fp32 [rows, length], 0 for tokens without a target. batch: contains `labels` and the `fields` above.
        Control flow may depend only on shapes, because a plan traces this method on tensors without data.
        """
        return losses.sum()

    def units(self, batch: Batch) -> int:
        """Number of terms that `loss` sums, such as pairs; counted before any forward."""
        return self.model.num_targets(batch)

    # Optional method `token_losses(logits, place, batch)`: computes token losses [n] to use instead of -log p, from
    # logits [n, vocab_size]. `place` is the slice of the n tokens in the flattened rows.
    token_losses: Callable[..., Tensor] | None = None

    def record(self, name: str, values: Tensor, counts: Tensor | None = None) -> None:
        """Add values to the mean logged as `name`; see `Model.record`."""
        self.model.record(name, values, counts)

    # ---- for the platform and runners

    @property
    def is_plain(self) -> bool:
        """True if the objective is the model's own loss."""
        return type(self).loss is Objective.loss and self.token_losses is None

    @property
    def makes_samples(self) -> bool:
        """True if `begin_step` generates each step's samples; the dataset's own samples then cannot be evaluated."""
        return type(self).begin_step is not Objective.begin_step

    def attach(self, model: Model) -> None:
        """Set the model. Raises ConfigError if the model does not support the objective."""
        self.model = model
        if self.is_plain:
            return
        if any(routers.has_loss for routers in model.structure.routers()):
            raise ConfigError(
                "run.objective: the routers' loss, a mean over targets, is not supported; set model.router_loss=none"
            )
        if not takes_mode(model):
            raise ConfigError(f"run.objective: {type(model).__name__}.forward has no parameter `mode`; add it")

    def inputs(self, batch: Batch, mode: ForwardMode = PLAIN) -> dict[str, Any]:
        """Return keyword arguments with which the model's forward returns the `loss`, or the result for `mode`."""
        given = {name: value for name, value in batch.items() if name not in self.fields}
        if "labels" in batch and mode.reduce is None and not self.is_plain:
            if type(self).loss is not Objective.loss:  # otherwise the logits are computed once, not twice
                mode = replace(mode, reduce=partial(self._reduced, batch=batch))
            if self.token_losses is not None:
                mode = replace(mode, token_losses=partial(self.token_losses, batch=batch))
        return given | mode.arguments()

    def _reduced(self, losses: Tensor, batch: Batch) -> Tensor:
        if self.needs_reference and "reference" not in batch:
            raise ConfigError("run.objective: the reference's log-probabilities are available only in training")
        return self.loss(losses, batch)

    def num_targets(self, batch: Batch) -> int:
        """Return `units` of a batch. Raises TrainingError unless it is an int."""
        try:
            return index(found := self.units(batch))
        except TypeError as error:
            name = f"{self.units.__module__}: {self.units.__qualname__}"
            raise TrainingError(f"{name} has to return the number of targets, an int, not {found!r:.60}") from error

    @property
    def targets(self) -> str:
        """Unit of `num_targets`, such as tokens; perplexity is reported only if the unit is tokens."""
        return self.unit or self.model.targets


def log_probabilities(losses: Tensor) -> Tensor:
    """Return the log-probability [rows] of each row's targets, given the token losses [rows, length]."""
    return -losses.sum(1)
