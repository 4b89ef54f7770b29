"""Families of transformers under causal_lm: initial values, losses and gradients are transformers' own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from crosstrain.checkpoint.boxes import Shard, whole_pieces
from crosstrain.checkpoint.load_weights import fill_initial
from crosstrain.config.registry import registry
from crosstrain.modeling.base import Model
from crosstrain.modeling.meta_init import materialize, parameters_on_meta
from crosstrain.utils.errors import ConfigError
from fixtures_families import BUILDS, ENCODERS, NOT_TINY, OWN_HEADS, REFUSED, tiny

QUICK = ["llama", "roberta", "gemma2", "phi", "cohere", "mamba", "opt", "rwkv", "openai-gpt", "apertus"]
TRAINS = [
    pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow)
    for family in BUILDS
    if family not in REFUSED
]


def theirs(family: str, seed: int) -> PreTrainedModel:
    return theirs_of(tiny(family), seed)


def theirs_of(config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    config = dict(config)
    torch.manual_seed(seed)
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    return AutoModelForCausalLM.from_config(made, attn_implementation="eager", dtype=torch.float32)


def ours(seed: int = 1, **options: Any) -> Model:
    kind = registry.get("model", "causal_lm")
    with parameters_on_meta():
        model = kind(kind.Options(**options))
    materialize(model, torch.device("cpu"))
    shapes = {name: tuple(model.weights.logical_shape(name, p.shape)) for name, p in model.weights.parameters().items()}
    values = {name: p.data[tuple(map(slice, shapes[name]))] for name, p in model.weights.parameters().items()}
    shards = [Shard("param", name, shapes[name], whole_pieces(v, shapes[name])) for name, v in values.items()]
    fill_initial(model, shards, seed)
    return model


def logical(model: Model, gradients: bool = False) -> dict[str, Tensor]:
    """Parameters, or their gradients, without padding."""
    found = {}
    for name, p in model.weights.parameters().items():
        value = (torch.zeros_like(p) if p.grad is None else p.grad) if gradients else p.detach()
        found[name] = value[tuple(map(slice, model.weights.logical_shape(name, p.shape)))]
    return found


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference between the distribution functions of two samples (Kolmogorov and Smirnov)."""
    a, b = a.flatten().sort().values, b.flatten().sort().values
    both = torch.cat([a, b])
    shares = [torch.searchsorted(x, both, right=True) / len(x) for x in (a, b)]
    return (shares[0] - shares[1]).abs().max().item()


@pytest.mark.parametrize("family", TRAINS)
def test_a_family_begins_and_trains_as_in_transformers(family: str) -> None:
    reference = theirs(family, 0)
    others = [dict(theirs(family, seed).named_parameters()) for seed in (1, 2)]
    model = ours(config=tiny(family))
    values = logical(model)
    assert values.keys() == dict(reference.named_parameters()).keys()
    for name, parameter in reference.named_parameters():
        value, expected = values[name], parameter.detach()
        fixed = (expected == others[0][name]) & (expected == others[1][name])  # what no random number makes
        assert torch.equal(value[fixed], expected[fixed]), name
        drawn = int((~fixed).sum())
        if drawn:
            # Two samples of n from one distribution are so far apart once in 2 exp(-2 * 3^2) = 3e-8.
            assert distance(value[~fixed], expected[~fixed]) < 3 * math.sqrt(2 / drawn), name
        with torch.no_grad():
            parameter.copy_(value)

    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(3))
    labels = torch.cat([ids[:, 1:], ids.new_full((2, 1), -100)], 1)
    reference.eval(), model.eval()
    logits = reference(input_ids=ids, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    loss = model(input_ids=ids, labels=labels)
    loss.backward(), expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = logical(model, gradients=True)
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
    for name, parameter in reference.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # Sums in another order; recurrences of many steps round more.
        assert (gradients[name] - gradient).norm().item() < 1e-5 * norm, name
    assert torch.allclose(model(input_ids=ids), logits[:, -1].float(), rtol=1e-5, atol=1e-5)
    cache, seen = model.new_cache(), 0
    for end in (7, 8, 9):  # as text is generated
        with torch.no_grad():
            following = model(input_ids=ids[:, seen:end], cache=cache)
        # Recurrences round more. transformers' ProphetNet gives a token other logits by the length of what follows.
        error = 1e-4 if family != "prophetnet" else 2e-3
        assert torch.allclose(following, logits[:, end - 1].float(), rtol=1e-4, atol=error)
        seen = 0 if cache is None else end


def _gradients(model: Model, batches: list[dict[str, Tensor]]) -> tuple[float, Tensor]:
    """The sum of the batches' losses, and its gradient as one vector."""
    model.zero_grad()
    loss = torch.stack([model(**batch) for batch in batches]).sum()
    loss.backward()
    return loss.item(), torch.cat([gradient.flatten() for gradient in logical(model, gradients=True).values()])


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in BUILDS if family not in REFUSED])
def test_a_family_keeps_documents_apart_or_is_refused_before_training(family: str) -> None:
    model = ours(config=tiny(family))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    try:
        model.structure.check_documents()
    except ConfigError:
        return
    # torch has no experts in fp64, and these masks are fp32
    in_fp32 = model.structure.experts() or model.has_dense_masks or family == "xglm"
    model.eval().to(torch.float32 if in_fp32 else torch.float64)
    ids = torch.randint(3, 100, (1, 31), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": torch.arange(31)[None]}
    batch["labels"][0, 19] = -100
    batch["position_ids"][0, 20:] -= 20
    apart = [{key: value[:, place] for key, value in batch.items()} for place in (slice(20), slice(20, 31))]
    loss, gradient = _gradients(model, [batch])
    expected, expected_gradient = _gradients(model, apart)
    # Sums in another order; a token that sees the other document makes more than 1e-3 of the gradient.
    assert loss == pytest.approx(expected, rel=1e-6)
    assert (gradient - expected_gradient).norm() < 1e-4 * expected_gradient.norm()


@pytest.mark.slow
@pytest.mark.parametrize("family", NOT_TINY)
def test_what_is_not_built_tiny(family: str) -> None:
    """So that the list does not outlive its reasons."""
    with torch.device("meta"):
        try:
            model = theirs(family, 0)
        except Exception:
            return
    assert sum(p.numel() for p in model.parameters()) > 3e7


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_trained_is_refused_in_a_sentence(family: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[family]):
        ours(config=tiny(family))


@pytest.mark.parametrize("family", [*sorted(OWN_HEADS), "llama", "gemma2"])
def test_a_head_of_its_own_kind_keeps_the_models_forward(family: str) -> None:
    assert (ours(config=tiny(family)).product is None) == (family in OWN_HEADS)


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_is_told_how_it_becomes_a_causal_model(family: str) -> None:
    with pytest.raises(ConfigError, match=f"{family} does not predict .* with config.is_decoder: true"):
        ours(config=tiny(family) | {"is_decoder": False})


OUTPUTS = {
    "output_router_logits": True, "use_cache": False, "output_hidden_states": True, "return_dict": False,
    "output_attentions": True,
}  # fmt: skip


@pytest.mark.parametrize("key", OUTPUTS)
@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "roberta"])
def test_what_a_forward_returns_besides_changes_nothing(family: str, key: str) -> None:
    config = tiny(family)
    if key == "output_router_logits" and "num_experts" not in config:
        return
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(3))
    labels = torch.cat([ids[:, 1:], ids.new_full((2, 1), -100)], 1)
    losses = []
    for given in (config, config | {key: OUTPUTS[key]}):
        model = ours(config=given).train()
        torch.manual_seed(0)  # of dropout
        losses.append(model(input_ids=ids, labels=labels))
    assert torch.equal(*losses)


@pytest.mark.parametrize("family", ["doge", "jetmoe"])
def test_the_loss_of_routers_that_are_not_watched_is_transformers_own(family: str) -> None:
    own = {"doge": {"is_moe": True, "router_aux_loss_coef": 0.5}, "jetmoe": {"aux_loss_coef": 0.5}}
    config = tiny(family) | {"output_router_logits": True} | own[family]
    reference, model = theirs_of(config), ours(config=config)
    values = logical(model)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(values[name])
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(3))
    labels = torch.cat([ids[:, 1:], ids.new_full((2, 1), -100)], 1)
    out = reference.train()(input_ids=ids, labels=ids)
    loss = model.train()(input_ids=ids, labels=labels)
    assert out.aux_loss.item() > 0.1
    assert loss.item() == pytest.approx(22 * out.loss.item(), rel=1e-6)
    loss.backward(), (22 * out.loss).backward()
    gradients = logical(model, gradients=True)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5), name
    with torch.no_grad():  # an evaluation's loss is the tokens'
        logits = reference.eval()(input_ids=ids).logits[:, :-1].flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
        assert model.eval()(input_ids=ids, labels=labels).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("family", ["roberta", "llama4_text"])
def test_padding_of_the_vocabulary_has_no_share_in_a_head_of_its_own_kind(family: str) -> None:
    config = tiny(family) | {"vocab_size": 100}
    reference, model = theirs_of(config), ours(config=config)  # 28 rows of padding
    values = logical(model)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(values[name])
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(3))
    labels = torch.cat([ids[:, 1:], ids.new_full((2, 1), -100)], 1)
    reference.eval(), model.eval()
    expected = reference(input_ids=ids, labels=ids).loss  # the mean over 22 targets
    loss = model(input_ids=ids, labels=labels)
    loss.backward(), (expected * 22).backward()
    assert loss.item() == pytest.approx(22 * expected.item(), rel=1e-6)
    gradients, padding = logical(model, gradients=True), 0
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6), name
    for name, parameter in model.weights.parameters().items():
        if (logical_shape := model.weights.logical_shape(name, parameter.shape)) != parameter.shape:
            padding += 1
            assert not parameter.grad[logical_shape[0] :].any(), name
    assert padding
    assert model(input_ids=ids).shape == (2, 100)
