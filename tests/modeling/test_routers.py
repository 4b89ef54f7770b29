"""Routers' losses by themselves: their value, and the tokens and layouts that they do not depend on."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from crosstrain_plugins.builtin.commands.compare.forward import flipped, nearly_tied
from torch import Tensor

from crosstrain.config.registry import registry
from crosstrain.config.schema import OptionError
from crosstrain.modeling import activation_checkpointing
from crosstrain.modeling.base import Model
from crosstrain.utils.errors import ConfigError

CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8,
    "max_position_embeddings": 32, "router_aux_loss_coef": 0.1,
}  # fmt: skip
DEEPSEEK = CONFIG | {
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
for key in ("num_experts", "router_aux_loss_coef", "head_dim"):
    del DEEPSEEK[key]
EXACT = 1e-6  # relative, of sums that are rounded in another order in fp32


def build(config: dict[str, Any] = CONFIG, **options: Any) -> Model:
    kind = registry.get("model", "causal_lm")
    model = kind(kind.Options(config=copy.deepcopy(config), make_vocab_size_divisible_by=1, **options))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5 if ".gate." in name else 0.1)
    return model.train()


def rows() -> dict[str, Tensor]:
    """Four rows, with padding at the end of one and targets that are ignored at the beginning of another."""
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    labels[1, 10:] = labels[2, :5] = -100
    return {"input_ids": ids, "labels": labels}


def trained(model: Model, batches: Iterable[dict[str, Tensor]]) -> tuple[float, Tensor]:
    """The loss of a step's micro batches, and its gradient."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = model(**batch)
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def cut(batch: dict[str, Tensor], *sizes: int) -> list[dict[str, Tensor]]:
    return [
        dict(zip(batch, parts, strict=True)) for parts in zip(*(x.split(sizes) for x in batch.values()), strict=True)
    ]


def distance(a: tuple[float, Tensor], b: tuple[float, Tensor]) -> float:
    return max(abs(a[0] / b[0] - 1), float((a[1] - b[1]).norm() / b[1].norm()))


def test_a_sequence_is_balanced_alike_in_every_micro_batch() -> None:
    model, batch = build(router_z_loss_coef=0.01), rows()
    assert distance(trained(model, cut(batch, 1, 3)), trained(model, [batch])) < EXACT


def test_a_balance_over_micro_batches_depends_on_them() -> None:
    model, batch = build(router_loss="micro_batch"), rows()
    assert distance(trained(model, cut(batch, 1, 3)), trained(model, [batch])) > 1e-3


def test_the_value_is_the_one_of_the_formula() -> None:
    batch = {key: value[:1] for key, value in rows().items()}
    model = build()
    plain = build(router_loss="none")(**batch)
    logits = model.lm.model(batch["input_ids"], output_router_logits=True).router_logits
    wanted = 0.0
    for layer in logits:
        f = torch.nn.functional.one_hot(layer.topk(2).indices, 8).sum(1).float().mean(0)
        wanted += 8 * float((f * layer.softmax(-1).detach().mean(0)).sum()) / len(logits)
    assert (model(**batch) - plain).item() / 16 == pytest.approx(0.1 * wanted, rel=1e-4)  # a difference of losses
    model.take_recorded()
    model(**batch)
    recorded = {name: total / number for name, (total, number) in model.take_recorded().items()}
    assert recorded["load_balancing_loss"] == pytest.approx(wanted, rel=1e-5)
    assert 0 < recorded["router_entropy"] < 2.08  # log 8
    assert int(recorded["expert_load"].sum()) == 2 * 2 * 16  # layers, choices, tokens


def test_padding_and_ignored_tokens_do_not_count() -> None:
    model = build()
    batch = {key: value[1:2] for key, value in rows().items()}  # whose last six tokens are padding
    short = {key: value[:, :10] for key, value in batch.items()}
    assert distance(trained(model, [batch]), trained(model, [short])) < EXACT


def test_documents_of_a_row_are_balanced_as_if_they_were_apart() -> None:
    model, batch = build(), rows()
    position_ids = torch.cat([torch.arange(6), torch.arange(10)]).expand(4, 16)
    apart = [{key: value[:, place] for key, value in batch.items()} for place in (slice(0, 6), slice(6, 16))]
    packed = batch | {"position_ids": position_ids}
    assert distance(trained(model, [packed]), trained(model, apart)) < EXACT


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradient_checkpointing_keeps_the_loss(mode: activation_checkpointing.Mode) -> None:
    model, batch = build(), rows()
    wanted = trained(model, [batch])
    for blocks, chosen in model.structure.checkpointing(mode):
        activation_checkpointing.apply(blocks, chosen, nullcontext)
    assert distance(trained(model, [batch]), wanted) < EXACT


def test_a_loss_without_routers_is_refused() -> None:
    with pytest.raises(ConfigError, match="llama has no routers"):
        build({"model_type": "llama", "vocab_size": 64, "hidden_size": 32}, router_loss_coef=0.1)
    with pytest.raises(OptionError, match="num_expert"):
        build(CONFIG | {"num_expert": 2})


def test_biases_move_towards_the_experts_that_are_chosen_too_little() -> None:
    model = build(DEEPSEEK, router_bias_rate=0.5)
    assert model.routers is not None
    model(**rows())
    loads = model.take_recorded()["expert_load"][0][0]
    for applied in (False, True):
        model.routers.end_step(None, applied)
        bias = model.routers.modules[0].get_buffer("e_score_correction_bias")
        wanted = 0.5 * (loads.mean() - loads).sign() if applied else torch.zeros(8)
        assert torch.equal(bias, wanted.float())
        model(**rows())


def test_arithmetic_counts_the_experts_that_a_token_uses() -> None:
    model = build()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert model.structure.idle_parameters == experts * 6 // 8  # 2 of 8 are chosen
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name)
    assert model.structure.flops_per_token(16) == 6 * (matrices - model.structure.idle_parameters) + 12 * 2 * 32 * 16


def test_a_choice_that_a_tie_flips_is_told_with_its_margin() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0 - 1e-5, 0.0], [1.0, 5.0, 3.0, 2.0]])
    found = [nearly_tied({7: (logits, torch.tensor([[0, last], [2, 1]]))}, 1e-3) for last in (1, 2)]
    theirs, mine = ({f"{layer} 16 {token}": near for (layer, token), near in each.items()} for each in found)
    assert list(theirs) == ["7 16 0"], "the other token's choice is clear"
    said = flipped(mine, theirs, None)
    assert "at layer 7, token 0 of sample 16, by a margin of 1.0e-05:" in str(said)
    assert flipped(theirs, theirs, None) is None
