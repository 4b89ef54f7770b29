"""Everything that touches private parts of transformers (seen with 5.24; at least 5.15).

- `_attn_implementation` of a configuration, and `initialize_weights`, which constructors call.
- The logits' scale and softcap have other names in each family, so they are measured by the model's own forward. A
  head that is more than a matrix product keeps that forward, with all logits.
- Initial values are in `_init_weights` alone, so it is run.
- `_can_record_outputs` says which modules are routers.
- Modules of experts are those that the decorator `use_experts_implementation` has marked.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from crosstrain.modeling.attention import Attention, choose_attention
from crosstrain.modeling.cross_entropy import Logits
from crosstrain.modeling.meta_init import parameters_on_meta
from crosstrain.utils.errors import ConfigError
from crosstrain.utils.logging import log


def padded(
    config: PreTrainedConfig, multiple: int, attention: Attention | None, model: type[PreTrainedModel]
) -> PreTrainedConfig:
    """The configuration with a vocabulary padded to a multiple of `multiple`, and an attention that `model` has."""
    config = copy.deepcopy(config)
    config.vocab_size = -(-config.vocab_size // multiple) * multiple
    config._attn_implementation = choose_attention(attention, model, config)
    # Training reads nothing that a forward returns beside the hidden states.
    config.update({"return_dict": True, "output_hidden_states": False, "output_attentions": False})
    return config


def attend_by(lm: PreTrainedModel, attention: str) -> None:
    """Have blocks call the attention function of this name, from now on: a backward may compute a forward again."""
    if lm.config._attn_implementation != attention:
        lm.config._attn_implementation = attention


def routers_of(lm: PreTrainedModel) -> list[nn.Module]:
    """The routers of a mixture of experts, which return logits, weights and choices."""
    recorders = getattr(lm, "_can_record_outputs", None)
    recorder: Any = recorders.get("router_logits") if isinstance(recorders, dict) else None
    kind = getattr(recorder, "target_class", None)
    return [] if kind is None or recorder.index != 0 else [m for m in lm.modules() if isinstance(m, kind)]


@contextmanager
def without_initial_values() -> Iterator[None]:
    """Let constructors tie weights but fill none: zeroing a pad token's row fails where other ranks hold it."""
    with patch.object(PreTrainedModel, "initialize_weights", lambda self: None):
        yield


class _Hidden:
    """A base model's output with hidden states alone."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()


class _Products(nn.Module):
    """A head with few rows, repeated for all tokens. They are no parameters, so that nothing moves or shards them."""

    def __init__(self, weight: Tensor, bias: Tensor | None, tokens: int) -> None:
        super().__init__()
        self.weight, self.bias, self.rows = weight, bias, torch.arange(tokens) % len(weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight, self.bias)[..., self.rows]


def measured_logits(lm: PreTrainedModel) -> tuple[float, float | None] | None:
    """Measure scale and softcap of the model's logits, as in `Logits`, by its own forward with known hidden states.

    Returns None for logits that are a different function of the hidden states. Raises ConfigError for a model that does
    not predict the next token.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # of a loss that is not named after the model
    decodes = getattr(lm.config, "is_decoder", None)
    measured, of_next = None, decodes is None
    try:
        if type(head := lm.get_output_embeddings()) is nn.Linear and lm.base_model is not lm:
            measured, of_next = _probe(lm, head)
    except Exception as error:  # of many kinds: the forward was not written for such a head
        log.debug("the head of %s keeps the model's own forward: %s", lm.config.model_type, error)
    finally:
        logging.set_verbosity(verbosity)
    causal = {getattr(module, "is_causal", None) for module in lm.modules()}
    sees_all = False in causal and True not in causal  # beside causal attention, the others attend to layers or images
    if not decodes and (sees_all or not of_next):  # decoders of translators leave it to others to shift the labels
        raise ConfigError(
            f"model: {lm.config.model_type} does not predict the next token from those before it; only causal models "
            f"can be trained{', such as this one with config.is_decoder: true' if decodes is False else ''}"
        )
    return measured


def _probe(lm: PreTrainedModel, head: nn.Linear) -> tuple[tuple[float, float | None] | None, bool]:
    """Return what `measured_logits` does, and True if the model's own loss is the next token's.

    Raises whatever the model's forward does with hidden states and a head that are not its own.
    """
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(8, head.in_features, generator=rng).double()
    bias = None if head.bias is None else torch.randn(8, generator=rng).double()
    hidden = torch.randn(1, 6, head.in_features, generator=rng).double()
    weight[0], hidden[0, :2] = 0.0, 0.0
    weight[0, 0], hidden[0, 0, 0], hidden[0, 1, 0] = 1.0, 2.0**-20, 2.0**40
    if bias is not None:
        bias[0] = 0.0
    labels = torch.tensor([[-100, -100, -100, 1, 2, 3]])
    name = next(name for name, module in lm.named_modules() if module is head)
    products = _Products(weight, bias, head.out_features)
    try:
        lm.set_submodule(name, products)
        with ExitStack() as stack, torch.no_grad():
            for module in {lm.base_model, lm.get_decoder()} - {lm}:  # some heads ask the one, some the other
                stack.enter_context(patch.object(module, "forward", lambda *_, **__: _Hidden(hidden)))
            found = lm(input_ids=torch.zeros(1, 6, dtype=torch.long)).logits
            loss = lm(input_ids=torch.zeros(1, 6, dtype=torch.long), labels=labels).loss
    finally:
        lm.set_submodule(name, head)
    scale, top = float((found[0, 0, 0] * 2**20).float()), float(found[0, 1, 0])
    softcap = None if abs(top) > 2**30 * abs(scale) else top
    expected = products(hidden)
    Logits(None, scale, softcap).apply_(expected)
    # Some models compute logits in fp32.
    alike = scale > 0 and torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-7)
    own = found.double() if not alike else expected
    of_next = torch.isclose(loss.double(), nn.functional.cross_entropy(own[0, :-1], labels[0, 1:]), rtol=1e-5)
    return (scale, softcap) if alike else None, bool(of_next)


def holds_experts(module: nn.Module) -> bool:
    """Return True for a module whose parameters are stacked by expert."""
    return all(hasattr(module, mark) for mark in ("is_transposed", "is_concatenated", "has_bias", "num_experts"))


def skeleton(lm: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """A model of the class of `lm` for `initialize`: vectors have their constructor's values, matrices no memory."""
    with torch.random.fork_rng(devices=[]), parameters_on_meta(but=lambda p: p.numel() == max(p.shape, default=1)):
        torch.manual_seed(0)
        return type(lm)(copy.deepcopy(config))


def initialize(skeleton: PreTrainedModel, name: str, value: Tensor, rng: torch.Generator) -> None:
    """Fill `value` with transformers' initial value of the parameter `name` of a model like `skeleton`.

    Runs the rules of the module that has the parameter and of those around it, with random numbers from `rng`. A part
    that none of them fills gets its constructor's value, or is drawn from N(0, initializer_range) if it is a matrix.
    """
    # A tied parameter begins as the one that it is tied to, also where a family names its head first.
    *path, attribute = skeleton.all_tied_weights_keys.get(name, name).split(".")
    around = [skeleton.get_submodule(".".join(path[:n])) for n in range(len(path) + 1)]
    owner, rules, rule = around[-1], [], skeleton._init_weights
    for module in around:
        rule = module._init_weights if isinstance(module, PreTrainedModel) else rule
        rules.append((rule, module))
    kept = owner.get_parameter(attribute)
    owner._parameters[attribute] = nn.Parameter(value.fill_(torch.nan), requires_grad=False)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.set_rng_state(rng.get_state())
            for rule, module in reversed(rules):
                rule(module)
    finally:
        owner._parameters[attribute] = kept
    if (left := value.isnan()).any():
        std = getattr(skeleton.config, "initializer_range", None) or 0.02
        begun = torch.empty_like(value).normal_(0.0, std, generator=rng) if kept.is_meta else kept.detach()
        value.copy_(torch.where(left, begun, value))
