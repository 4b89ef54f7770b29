"""Maximal update parametrization: the table's rules, written out in plain torch, and equal steps under shards."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from crosstrain_plugins.builtin.models.hugging_face.mup import MaximalUpdate
from torch import Tensor

from conftest import Workspace
from crosstrain.checkpoint.boxes import Shard, whole_pieces
from crosstrain.checkpoint.load_weights import fill_initial
from crosstrain.config.load import load_config
from crosstrain.engine.build import make_model
from crosstrain.engine.optimizer import optimizer_factory
from crosstrain.modeling.base import Model
from crosstrain.utils.errors import ConfigError
from fixtures_ranks import mostly_slow, train

BASE, WIDTH, LAYERS, WORDS = 16, 64, 2, 128
M = WIDTH / BASE
GPT2 = (
    "model.dropout=0",
    "model.make_vocab_size_divisible_by=1",
    f"model.n_embd={WIDTH}",
    f"model.n_layer={LAYERS}",
    "model.n_head=4",
)
LLAMA = {
    "model_type": "llama", "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
MOE = LLAMA | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def built(project: Path, *options: str) -> tuple[Model, Any]:
    """A model with its initial values, and its optimizer."""
    config = load_config(project, [*options, "run.optimizer={name: adamw, eps: 1e-12}", "run.weight_decay=0"])
    model = make_model(config)
    fill_initial(model, _shards(model), seed=0)
    return model, optimizer_factory(config, model)(model.named_parameters())


def _shards(model: Model) -> list[Any]:
    shape_of = model.weights.logical_shape
    return [
        Shard("param", name, tuple(shape_of(name, p.shape)), whole_pieces(p.data, tuple(shape_of(name, p.shape))))
        for name, p in model.weights.parameters().items()
    ]


def causal_lm(config: dict[str, Any]) -> tuple[str, ...]:
    return (f"model={json.dumps({'arch': 'causal_lm', 'config': config, 'make_vocab_size_divisible_by': 1})}",)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_steps_are_those_of_a_multiplier_of_the_logits(workspace: Workspace, family: str) -> None:
    """The table's output multiplier, as torch code, trains like the scaled last norm."""
    given = GPT2 if family == "gpt2" else causal_lm(LLAMA)
    model, optimizer = built(workspace.project, *given, f"model.mup_base_width={BASE}")
    other, _ = built(workspace.project, *given)
    ids = torch.randint(0, 100, (4, 17), generator=torch.Generator().manual_seed(1))
    last = "ln_f" if family == "gpt2" else "model.norm"
    hidden, rest = list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            is_hidden = p.ndim > 1 and (".h." in name or ".layers." in name)
            q.copy_(p * M if last in name else p)
            (hidden if is_hidden else rest).append(q)
    groups = [{"params": hidden, "lr": 0.01 / M}, {"params": rest, "lr": 0.01}]
    theirs = torch.optim.AdamW(groups, eps=1e-12, weight_decay=0.0, betas=(0.9, 0.95))
    for group in optimizer.param_groups:
        group["lr"], group["betas"] = 0.01 * group.get("lr_scale", 1.0), (0.9, 0.95)
    for _ in range(5):
        ours = model(input_ids=ids[:, :-1], labels=ids[:, 1:]) / ids[:, 1:].numel()
        logits = other.lm(ids[:, :-1]).logits / M  # type: ignore[union-attr, operator]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        # Adam divides by the root of a mean of squares, so differences of rounding grow in some steps.
        assert ours.item() == pytest.approx(loss.item(), rel=2e-5)
        for value, which in ((ours, optimizer), (loss, theirs)):
            value.backward()
            which.step()
            which.zero_grad()


@pytest.mark.parametrize("config", [LLAMA, MOE, LLAMA | {"tie_word_embeddings": True}], ids=["llama", "moe", "tied"])
def test_values_and_rates_of_each_kind_of_parameter(workspace: Workspace, config: dict[str, Any]) -> None:
    plain, _ = built(workspace.project, *causal_lm(config))
    scaled, _ = built(workspace.project, *causal_lm(config), f"model.mup_base_width={BASE}")
    for (name, before), after in zip(plain.named_parameters(), scaled.parameters(), strict=True):
        inside = ".layers." in name and before.ndim > 1
        router = name.endswith("mlp.gate.weight")
        factor = 1 / M if name == "lm.model.norm.weight" or router else 1 / math.sqrt(M) if inside else 1.0
        torch.testing.assert_close(after, before * factor)
        assert scaled.weights.lr_scale(name) == (1 / M if inside or name == "lm.model.norm.weight" else 1.0)


def test_the_base_width_itself_changes_nothing(workspace: Workspace) -> None:
    plain, _ = built(workspace.project, *GPT2)
    same, _ = built(workspace.project, *GPT2, f"model.mup_base_width={WIDTH}")
    assert isinstance(same.weights, MaximalUpdate)
    for before, after in zip(plain.parameters(), same.parameters(), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("runner", mostly_slow(["fsdp@2", "megatron_tp2@2", "megatron_pp2@2"], ["megatron_tp2@2"]))
def test_other_runners_take_the_same_steps(shared_workspace: Workspace, runner: str) -> None:
    options = (*GPT2, f"model.mup_base_width={BASE}", "run.max_iters=8", "run.grad_norm_clip=0")
    ddp = train(shared_workspace.project, "mup_ddp", *options)
    name, size = runner.split("@")
    other = train(shared_workspace.project, f"mup_{name}", *options, f"run.runner={name}", size=int(size))
    assert other.column("loss") == pytest.approx(ddp.column("loss"), rel=2e-6)


def test_what_the_rules_do_not_cover_is_refused(workspace: Workspace) -> None:
    gemma = LLAMA | {"model_type": "gemma2", "head_dim": 16}
    with pytest.raises(ConfigError, match=r"model.norm.weight is added to 1, so it cannot scale the logits"):
        built(workspace.project, *causal_lm(gemma), f"model.mup_base_width={BASE}")
    config = load_config(workspace.project, [*GPT2, f"model.mup_base_width={BASE}", "run.optimizer=muon"])
    with pytest.raises(ConfigError, match="its learning rates are those of AdamW"):
        optimizer_factory(config, make_model(config))
