"""A model's structure: its blocks and the modules around them, for runners that shard, pipeline or trace a model."""

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
    """Names of a model's modules outside of its blocks, including all modules with parameters."""

    first: list[str]  # run before the first block
    last: list[str]  # run after the last block; the last module is the head, and `ForwardMode.output` gets its weight


class Structure:
    """Describes the modules of a model. The defaults are enough for data parallelism, FSDP and ZeRO."""

    reads_across = False  # True: modules read the weights of other modules in their block, so these must not be sharded

    def __init__(self, model: Model) -> None:
        self.model = model

    def ends(self) -> Ends | None:
        """Modules before and after the blocks, for pipeline stages; None: unknown, so the model cannot be pipelined.

        A model with ends calls its blocks in order. Each block takes hidden states [batch, length, H] as its first
        argument and returns them. The forward ends with `ForwardMode.output`.
        """
        return None

    def experts(self) -> dict[str, Any]:
        """Name in `named_modules` -> module with the routed experts of a layer; none by default.

        The parameters of `num_experts` experts are stacked along the first dimension. The module's inputs are hidden
        states [tokens, width], expert indices [tokens, k] and expert weights [tokens, k]. Tokens are independent of
        each other.
        """
        return {}

    def routers(self) -> list[Routers]:
        """The routers of this model and its submodels."""
        models = (module for module in self.model.modules() if hasattr(module, "structure"))
        return [model.routers for model in models if model.routers is not None]  # type: ignore[misc]

    def chains(self) -> list[list[nn.Module]]:
        """Lists of blocks whose first input is the previous block's output; a plan traces a few blocks per list."""
        return [self.model.blocks()] if self.ends() is not None else []

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Pattern of canonical names -> style of tensor parallelism; the user can override it in YAML.

        A pattern such as `transformer.h.*.mlp.c_fc` matches names of parameters or modules; all others are replicated.
        The runner defines the styles.
        """
        return {}

    def check_documents(self) -> None:
        """Raise ConfigError unless `forward` masks attention between the documents given by position_ids."""
        raise ConfigError(f"model: {type(self.model).__name__} cannot keep the documents of a sequence apart")

    def check_context(self, ranks: int) -> None:
        """Raise ConfigError unless `forward` supports a `context` of `ranks` ranks that share rows and heads."""
        name = type(self.model).__name__
        raise ConfigError(f"run.runner.context_parallel: {name} cannot share a sequence among ranks")

    def checkpointing(self, mode: Mode) -> list[tuple[list[nn.Module], Mode]]:
        """Lists of blocks, each with its checkpointing mode; default: all blocks with the run's `mode`."""
        return [(self.model.blocks(), mode)]

    def adapted(self) -> Model:
        """The model that gets `model.adapter`: this model, or its language model."""
        return self.model

    def lighter(self, dtype: str) -> dict[str, str]:
        """Dotted key -> value of options that store frozen parameters in less memory without changing results.

        dtype: the run's autocast dtype, such as bf16. Default: no options.
        """
        return {}

    # ---- arithmetic

    def flops_per_token(self, sequence_length: int | None) -> float | None:
        """Floating-point operations of forward and backward per token, for MFU; None: unknown."""
        return None

    @property
    def idle_parameters(self) -> int:
        """Number of elements in experts that a token does not use; 0 for a dense model."""
        return 0
