"""A model's structure: its blocks and the modules around them, for runners that cut, stage or follow a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from crosstrain.modeling.activation_checkpointing import Mode
from crosstrain.utils.errors import ConfigError

if TYPE_CHECKING:
    from crosstrain.modeling.base import Model
    from crosstrain.modeling.routers import Routers


@dataclass(frozen=True)
class Ends:
    """Names of a model's modules outside of its blocks, including all that have parameters."""

    first: list[str]  # run before the first block
    last: list[str]  # run after the last block; the last one is the head, and `ForwardMode.output` gets its weight


class Structure:
    """What a model is made of. The defaults are enough for data parallelism, FSDP and ZeRO."""

    reads_across = False  # True: modules in a block read weights of others there, which have to be whole

    def __init__(self, model: Model) -> None:
        self.model = model

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

    def routers(self) -> list[Routers]:
        """The routers of the model and of the models in it."""
        models = (module for module in self.model.modules() if hasattr(module, "structure"))
        return [model.routers for model in models if model.routers is not None]  # type: ignore[misc]

    def chains(self) -> list[list[nn.Module]]:
        """Lists of blocks that take the previous one's result (a tensor) first; a plan computes few of each list."""
        return [self.model.blocks()] if self.ends() is not None else []

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Styles of tensor parallelism by pattern of canonical names. Plain data, which YAML can override.

        A pattern (`transformer.h.*.mlp.c_fc`) matches names of parameters, or of modules; others are replicated. The
        styles are the runner's.
        """
        return {}

    def check_documents(self) -> None:
        """Raise ConfigError unless `forward` keeps the documents of a sequence apart, which position_ids number."""
        raise ConfigError(f"model: {type(self.model).__name__} cannot keep the documents of a sequence apart")

    def check_context(self, ranks: int) -> None:
        """Raise ConfigError unless `forward` can share rows in a `context`, and heads of attention among `ranks`."""
        name = type(self.model).__name__
        raise ConfigError(f"run.runner.context_parallel: {name} cannot share a sequence among ranks")

    def checkpointing(self, mode: Mode) -> list[tuple[list[nn.Module], Mode]]:
        """Lists of blocks with a mode for each, by default the run's `mode`."""
        return [(self.model.blocks(), mode)]

    def adapted(self) -> Model:
        """The model that `model.adapter` changes: this one, or the language model in it."""
        return self.model

    def lighter(self, dtype: str) -> dict[str, str]:
        """Options, by dotted key, that keep frozen parameters in less memory and change no result.

        dtype: of the run's autocast, such as bf16. None by default.
        """
        return {}

    # ---- arithmetic

    def flops_per_token(self, sequence_length: int | None) -> float | None:
        """Floating-point operations of forward and backward per token, for the utilisation figure; None: unknown."""
        return None

    @property
    def idle_parameters(self) -> int:
        """Elements of the experts that a token does not choose; 0 in a dense model."""
        return 0
