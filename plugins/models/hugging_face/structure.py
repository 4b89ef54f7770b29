"""The structure of transformers' causal language models."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from crosstrain import ConfigError, Ends, Structure
from crosstrain.modeling.activation_checkpointing import Mode

from . import internals

if TYPE_CHECKING:
    from .base import TransformersModel

# transformers' name -> our name for a style in `Structure.tensor_parallel_plan`.
_STYLES = {
    "colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "summed",
    "embedding_rowwise": "vocabulary",  # tied embeddings, in older transformers versions
    "moe_tp_experts": "experts",
}  # fmt: skip


class TransformersStructure(Structure):
    """The structure of a model, read from its modules and its configuration in transformers."""

    model: TransformersModel

    def check_documents(self) -> None:
        family = self.model.config.model_type
        if not self.model.takes_positions:
            raise ConfigError(f"model: {family} takes no positions, so documents cannot be kept apart")
        if getattr(self.model.lm, "_is_stateful", False):
            raise ConfigError(f"model: {family} carries a state from document to document")
        if self.model.attention == "eager" and not self.model.sees_all:
            raise ConfigError("model.attention: eager cannot keep documents apart where windows slide")

    def check_context(self, ranks: int) -> None:
        family, heads = self.model.config.model_type, getattr(self.model.config, "num_attention_heads", None) or ranks
        if not self.model.takes_positions or getattr(self.model.lm, "_is_stateful", False) or not self.model.sees_all:
            raise ConfigError(
                f"run.runner.context_parallel: ranks can share sequences where every block attends to all of the past "
                f"and the model takes positions, and {family} is another; leave it out"
            )
        if self.model.attention == "eager":
            raise ConfigError("model.attention: eager wants whole sequences; context_parallel needs sdpa or a kernel")
        if heads % ranks:
            raise ConfigError(
                f"run.runner.context_parallel: {ranks} ranks cannot share the {heads} heads of attention evenly; "
                f"choose a divisor of {heads}"
            )

    def ends(self) -> Ends | None:
        lm = self.model.lm
        theirs = list(lm.config.base_model_pp_plan or {})
        lists = {name for name, module in lm.base_model.named_children() if isinstance(module, nn.ModuleList)}
        blocks = [name for name in theirs if name in lists]
        if len(blocks) != 1 or self.model.product is None:
            return None
        own = [f"lm.{lm.base_model_prefix}.{name}" for name in theirs]
        at = theirs.index(blocks[0])
        head = next(name for name, module in lm.named_modules() if module is lm.get_output_embeddings())
        return Ends(own[:at], [*own[at + 1 :], f"lm.{head}"])

    def experts(self) -> dict[str, nn.Module]:
        return {name: module for name, module in self.model.named_modules() if internals.holds_experts(module)}

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return transformers' plan, with a sharded vocabulary; empty if there is none or a style is not supported."""
        theirs = dict(self.model.lm.config.base_model_tp_plan or {})
        for stack in [pattern for pattern, style in theirs.items() if style == "moe_tp_experts"]:
            theirs = {pattern: style for pattern, style in theirs.items() if not pattern.startswith(f"{stack}.")}
        if not theirs or not set(theirs.values()) <= _STYLES.keys():
            return {}
        plan = {f"{self.model.lm.base_model_prefix}.{pattern}": _STYLES[style] for pattern, style in theirs.items()}
        # A plan is shared by a model family, and may name layers that this configuration does not have.
        everything = (*self.model.named_modules(), *self.model.named_parameters())
        names = [self.model.weights.canonical_name(name) for name, _ in everything]
        plan = {pattern: style for pattern, style in plan.items() if any(fnmatchcase(name, pattern) for name in names)}
        words, head = self.model.lm.get_input_embeddings(), self.model.lm.get_output_embeddings()
        cut = (words,) if words.weight is head.weight and head.bias is None else (words, head)
        if self.model.product is None:  # all ranks compute all logits
            return plan
        return plan | {name: "vocabulary" for name, module in self.model.lm.named_modules() if module in cut}

    def checkpointing(self, mode: Mode) -> list[tuple[list[nn.Module], Mode]]:
        if mode == "offload" and any(routers.has_loss for routers in self.routers()):
            raise ConfigError(
                "run.gradient_checkpointing: offload hides the routers from their loss; use full, or model.router_loss="
                "none"
            )
        return super().checkpointing(mode)

    def _matrices(self, experts: bool) -> Iterator[tuple[int, float]]:
        """Yield each module's number of matrix elements and the fraction used per token; `experts`: only experts."""
        for module in self.model.skeleton.modules():  # never sharded
            expert = internals.holds_experts(module)
            if not isinstance(module, nn.Embedding) and expert >= experts:
                share = self.model.config.num_experts_per_tok / module.num_experts if expert else 1.0
                yield sum(p.numel() for p in module.parameters(recurse=False) if p.ndim > 1), share

    @property
    def idle_parameters(self) -> int:
        return sum(round(elements * (1 - share)) for elements, share in self._matrices(experts=True))

    def flops_per_token(self, sequence_length: int | None) -> float | None:
        """Count six operations per matrix element used by a token, plus attention (Narayanan et al., 2021, 5.1)."""
        length = sequence_length or self.model.max_length
        layers, heads = (getattr(self.model.config, key, None) for key in ("num_hidden_layers", "num_attention_heads"))
        composite = self.model.text_config is not self.model.config
        if composite or not self.model.sees_all or not (length and layers and heads):
            return None
        width = heads * (getattr(self.model.config, "head_dim", None) or self.model.hidden_size // heads)
        used = sum(elements * share for elements, share in self._matrices(experts=False))
        return 6 * used + 12 * layers * width * length
