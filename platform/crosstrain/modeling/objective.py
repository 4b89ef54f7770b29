"""The interface of objective plugins: what training minimises in place of the targets' cross-entropy."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from crosstrain.modeling.base import Model, count_targets
from crosstrain.modeling.forward_mode import PLAIN, ForwardMode, takes_mode
from crosstrain.utils.errors import ConfigError
from crosstrain.utils.types import Batch


class Objective(ABC):
    """A function of the targets' losses. `run.objective: {name: ..., <Options>}` chooses and configures one.

    It sees -log p of each target token and the fields of the batch that the model does not read. What it returns is
    summed over the micro batches and ranks of a step and divided by the step's `units`, so that every runner and batch
    layout minimises the same.
    """

    fields: ClassVar[tuple[str, ...]] = ()  # of the batch, which the model does not read
    row_layout: ClassVar[str | None] = None  # `Dataset.row_layout` of the datasets that it takes
    unit: ClassVar[str] = "targets"  # noun for what `loss` sums over
    needs_reference: ClassVar = False  # True: the field `reference` has the rows' log-probabilities before training

    record: Callable[..., None]  # `Model.record` of the model that has the objective

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the units' losses, an fp32 scalar that is differentiable by `losses`.

        losses: fp32 [rows, length], 0 where there is no target; batch: `labels` and the `fields` that the dataset has.
        Shapes alone may decide what is computed: a plan traces this without values.
        """

    @abstractmethod
    def units(self, batch: Batch) -> int:
        """Number of what `loss` sums over, such as pairs; counted before any forward."""


def log_probabilities(losses: Tensor) -> Tensor:
    """Log-probability of each row's targets [rows], from their losses [rows, length]."""
    return -losses.sum(1)


class ModelWithObjective(Model):
    """The overrides of a model that has an objective."""

    objective: Objective

    def forward(self, mode: ForwardMode = PLAIN, **batch: Any) -> Any:
        fields = {name: batch.pop(name) for name in self.objective.fields if name in batch}
        if (labels := batch.get("labels")) is None:
            return super().forward(**batch, mode=mode)  # type: ignore[safe-super]
        reduce = mode.reduce or partial(self._reduced, batch={"labels": labels, **fields})
        return super().forward(**batch, mode=replace(mode, reduce=reduce))  # type: ignore[safe-super]

    def _reduced(self, losses: Tensor, batch: Batch) -> Tensor:
        if self.objective.needs_reference and "reference" not in batch:
            raise ConfigError("run.objective: the reference's log-probabilities are known in training alone")
        return self.objective.loss(losses, batch)

    def num_targets(self, batch: Batch) -> int:  # type: ignore[override]
        return count_targets(self.objective.units, batch)

    @property
    def targets(self) -> str:
        return self.objective.unit

    def num_tokens(self, batch: Batch) -> int:
        return super().num_targets(batch)


def set_objective(model: Model, objective: Objective) -> None:
    """Let a model's forward return the objective's loss of a batch, in place."""
    if any(routers.has_loss for routers in model.structure.routers()):
        raise ConfigError("run.objective: a loss of routers is a mean over targets; set model.router_loss=none")
    if not takes_mode(model):
        raise ConfigError(f"run.objective: {type(model).__name__}.forward has no parameter `mode`; give it one")
    model.__class__ = type(type(model).__name__, (ModelWithObjective, type(model)), {})
    model.objective, objective.record = objective, model.record  # type: ignore[assignment]
