"""A model's structure: its blocks and the modules around them, for runners that shard, pipeline or trace a model."""

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
    """Names of a model's modules outside of its blocks. No module with parameters may be missing."""

    first: list[str]  # modules that run before the first block
    last: list[str]  # modules that run after the last block; the last of them is the head
    first_blocks: int = 1  # minimum number of blocks in the first stage


class Structure:
    """Describes the modules of a model. The defaults are enough for data parallelism, FSDP and ZeRO."""

    reads_across = False  # True: modules read each other's weights, so a block needs all its weights unsharded

    def __init__(self, model: "Model") -> None:
        self.model = model

    def ends(self) -> Ends | None:
        """Modules before and after the blocks, for pipeline stages; None: unknown, so the model cannot be pipelined.

        A model with `Ends` calls its blocks in order. Each block takes hidden states [batch, length, H] as its first
        argument and returns new hidden states. At its end, the model's forward passes the weight of the head to
        `ForwardMode.output`.
        """
        return None

    def decoder_blocks(self) -> list[nn.Module]:
        """The blocks between `ends`: pipelines and sequence parallelism split this chain. Default: all blocks."""
        return self.model.blocks()

    def experts(self) -> dict[str, Any]:
        """Name in `named_modules` -> module with the routed experts of a layer; empty by default.

        The module stacks the parameters of its `num_experts` experts along the first dimension. The module's inputs are
        hidden states [tokens, width], expert indices [tokens, k] and expert weights [tokens, k]. The output for a token
        does not depend on the other tokens.
        """
        return {}

    def routers(self) -> list["Routers"]:
        """The routers of this model and its submodels."""
        models = (module for module in self.model.modules() if hasattr(module, "structure"))
        return [model.routers for model in models if model.routers is not None]  # type: ignore[misc]

    def by_document(self) -> list[nn.Module]:
        """Modules that call their submodules once per document of the argument `documents`.

        Ranks have different numbers of documents, so a runner cannot communicate in each call of these submodules.
        """
        return []

    def chains(self) -> list[list[nn.Module]]:
        """Chains of blocks: each block's first input is the output of the block before it in the chain.

        A plan traces only a part of each chain.
        """
        return [self.decoder_blocks()] if self.ends() is not None else []

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Pattern of canonical names -> style of tensor parallelism; the user can override the plan in YAML.

        A pattern such as `transformer.h.*.mlp.c_fc` matches names of parameters or modules. Parameters that no
        pattern matches are replicated. The runner defines the styles.
        """
        return {}

    def check_documents(self) -> None:
        """Raise ConfigError unless `forward` masks attention between the documents given by position_ids."""
        raise ConfigError(
            f"model: {type(self.model).__name__} cannot mask attention between the documents of a sequence"
        )

    def check_context(self, ranks: int) -> None:
        """Raise ConfigError unless `forward` supports a `context` of `ranks` ranks that share rows and heads."""
        raise ConfigError(
            f"run.runner.context_parallel: {type(self.model).__name__} cannot split a sequence among ranks"
        )

    def checkpointing(self, mode: Mode) -> list[tuple[list[nn.Module], Mode]]:
        """Lists of blocks, each list with a checkpointing mode; default: all blocks with the run's `mode`."""
        return [(self.model.blocks(), mode)]

    def adapted(self) -> "Model":
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
        """Number of elements in the experts that a token is not routed to; 0 for a dense model."""
        return 0
