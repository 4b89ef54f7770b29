"""Weights of mixtures of experts: as they are published, and their buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import Workspace
from crosstrain.checkpoint.boxes import Shard, whole_pieces
from crosstrain.checkpoint.load_weights import PretrainedWeights
from crosstrain.config.registry import registry
from crosstrain.modeling.base import Model
from fixtures_families import tiny
from fixtures_ranks import train
from fixtures_training import project, stored

IDS = torch.arange(24).view(2, 12)


def published(folder: Path, config: dict[str, Any]) -> Any:
    """Save a model with transformers; returns it."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    for name, parameter in lm.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in lm.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.arange(4.0))
    lm.save_pretrained(folder)
    return lm


def loaded(**options: Any) -> Model:
    """A model with the weights of its folders, cut into two pieces along the last dimension."""
    kind = registry.get("model", "causal_lm")
    model = kind(kind.Options(make_vocab_size_divisible_by=1, **options)).eval()
    shards = []
    for name, tensor in {**model.weights.parameters(), **model.weights.buffers()}.items():
        torch.nn.init.zeros_(tensor)
        shards.append(Shard("param", name, tuple(tensor.shape), whole_pieces(tensor, tuple(tensor.shape))))
    PretrainedWeights.of(model).fill(shards)
    return model


def last_logits(lm: Any) -> Tensor:
    with torch.no_grad():
        return lm(input_ids=IDS).logits[:, -1]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_experts_begin_as_they_are_published(family: str, tmp_path: Path) -> None:
    config = tiny(family) | ({"num_experts": 4} if family == "qwen3_moe" else {})
    lm = published(tmp_path, config)
    with torch.no_grad():
        ours = loaded(pretrained=str(tmp_path))(input_ids=IDS)
    assert torch.allclose(ours, last_logits(lm), rtol=1e-5, atol=1e-5)  # sums in another order


@pytest.mark.slow
def test_biases_of_routers_are_saved_resumed_and_exported(workspace: Workspace) -> None:
    model = tiny("deepseek_v3") | {"vocab_size": 320, "first_k_dense_replace": 1, "initializer_range": 0.2}
    project(workspace, {"arch": "causal_lm", "config": model, "router_bias_rate": 0.05})
    whole = train(workspace.project, "whole", "run.max_iters=6", "run.init_lr=1e-3")
    train(workspace.project, "parts", "run.max_iters=3", "run.init_lr=1e-3", "run.lr_decay_iters=6")
    parts = train(workspace.project, "parts", "run.max_iters=6", "run.init_lr=1e-3", "run.runner=fsdp", size=2)
    assert parts.column("loss") == pytest.approx(whole.column("loss")[-len(parts.column("loss")) :], rel=2e-6)
    biases = [name for name in stored(whole.checkpoint(6)) if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3
