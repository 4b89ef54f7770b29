"""Compiled blocks under tensor parallelism: one graph each, with its collectives, and the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from crosstrain.config.load import Config, load_config
from crosstrain.engine.build import build_model, make_runner
from crosstrain.utils.types import MicroBatch
from fixtures_families import tiny
from fixtures_ranks import run_ranks

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"arch": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 64,
             "dropout": 0.0},
    "llama": {"arch": "causal_lm", "config": tiny("llama")},
    "qwen": {"arch": "causal_lm", "config": tiny("qwen3")},
}  # fmt: skip


def _step(model: dict[str, Any], runner: str, compile: str) -> tuple[float, float, list[str], int, dict[str, Any]]:
    """Loss, gradient norm, graph breaks, graphs, and gradients of this rank after one micro batch."""
    from torch._dynamo.utils import counters

    options = ["run.amp=fp32", "run.device=cpu", f"run.runner={runner}", f"run.compile={compile}"]
    plain = load_config("projects/quickstart.yaml", options).plain
    config = Config.from_plain(plain | {"model": model})
    built = make_runner(config)
    built.setup()
    build_model(config, built, None, for_training=True)
    tokens = torch.randint(0, 128, (4, 33), generator=torch.Generator().manual_seed(1))
    micro_batch = MicroBatch(0, {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()}, 128)
    loss = built.forward_backward([micro_batch], 128)
    held = {name: built.held.gradient(p) for name, p in built.model.named_parameters()}
    gradients = {name: gradient.numpy() for name, gradient in held.items() if gradient is not None}
    norm = built.gradient_norm([p.grad for p in built.model.parameters() if p.grad is not None])
    built.close()
    return loss, norm, [*counters["graph_break"]], counters["stats"]["unique_graphs"], gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "runner"),
    [(family, "megatron_tp2") for family in MODELS] + [("llama", "megatron_tp2_sp"), ("llama", "megatron_pp2")],
)
def test_a_block_is_one_graph(family: str, runner: str) -> None:
    eager = run_ranks(2, _step, MODELS[family], runner, "none")
    compiled = run_ranks(2, _step, MODELS[family], runner, "blocks", seconds=280)
    for (loss, norm, _, _, gradients), (again, norm_again, breaks, graphs, found) in zip(eager, compiled, strict=True):
        assert breaks == []
        assert graphs >= 1, "nothing was compiled"
        # Fused kernels round differently; see test_step.
        assert (again, norm_again) == pytest.approx((loss, norm), rel=2e-6)
        for name, gradient in gradients.items():
            distance = torch.from_numpy(found[name] - gradient).norm()
            assert distance <= 1e-5 * torch.from_numpy(gradient).norm() + 1e-9, name  # a key's bias has none
