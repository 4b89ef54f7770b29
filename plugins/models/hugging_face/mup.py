"""Maximal update parametrization: the best learning rate of a narrow model is also that of a wide one."""

from typing import Any

from torch import Tensor

from crosstrain import Around, ConfigError, TransformersModel

from . import internals


class MaximalUpdate(Around):
    """Weights with initial values and rates for AdamW that depend on the width (Yang et al., 2022, table 8).

    Let m be the hidden size divided by `base_width`. Matrices in blocks start with 1 / sqrt(m) of the library's
    standard deviation, and learn with 1 / m of the rate. The table multiplies the logits by 1 / m. Here the last norm
    starts with 1 / m of its value and learns with 1 / m of the rate. Under AdamW this is the same, and the forward and
    the exported model stay those of the library. The head size must not depend on the width.
    """

    def __init__(self, model: TransformersModel, base_width: int) -> None:
        super().__init__(model.weights)
        self._ratio = model.hidden_size / base_width
        ends, head = model.structure.ends(), model.lm.get_output_embeddings()
        named = {id(p): name for name, p in model.named_parameters()}
        last = [] if ends is None else [m for m in map(model.get_submodule, ends.last) if m is not head]
        self._last = {named[id(p)] for module in last for p in module.parameters()}
        if not self._last:
            raise ConfigError(f"model.mup_base_width: {model.config.model_type} has no norm before its output head")
        self._hidden = {name for name in self.inner.matrices() if model.get_parameter(name).ndim > 1}
        self._routers = {named[id(p)] for module in internals.routers_of(model.lm) for p in module.parameters()}
        self._own = {self.inner.canonical_name(name): name for name in named.values()}

    def lr_scale(self, name: str) -> float:
        return float(self.inner.lr_scale(name)) / (self._ratio if name in self._hidden | self._last else 1.0)

    def initialize(self, name: str, value: Tensor, rng: Any) -> None:
        self.inner.initialize(name, value, rng)
        own = self._own[name]
        if own in self._last:
            if own.endswith("weight") and not value.any():
                raise ConfigError(f"model.mup_base_width: {name} is added to 1, so it cannot scale the logits")
            value /= self._ratio
        elif own in self._hidden:  # a router's outputs do not grow with the width, like logits
            value *= self._ratio ** (-1.0 if own in self._routers else -0.5)

    def matrices(self) -> set[str]:
        raise ConfigError("model.mup_base_width: its learning rates are those of AdamW; use run.optimizer adamw")
