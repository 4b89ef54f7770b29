"""Routers' losses of mixtures of experts are functions of a step's tokens, under every runner."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import Workspace
from fixtures_ranks import mostly_slow
from fixtures_training import TOLERANCE, assert_equal_training, follow, project, relative

# A wide initial range spreads the routers' logits: a choice that flips on a tie is another model.
SIZES = {
    "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "router_aux_loss_coef": 0.1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "intermediate_size": 32, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 32},
    "qwen2_moe": {
        "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "intermediate_size": 32,
    },
}  # fmt: skip
TRAINING = (
    "run.max_iters=20", "run.global_batch_size=8", "run.micro_batch_size=2", "run.init_lr=2e-3", "run.warmup_steps=0",
    "run.log_interval=1", "run.grad_norm_clip=1.0",
)  # fmt: skip
RECORDED = ("load_balancing_loss", "router_z_loss", "router_entropy", "expert_load")


@pytest.fixture(scope="module", params=mostly_slow(FAMILIES, ["qwen3_moe"]))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dataset: Any) -> Any:
    config = {"model_type": request.param} | SIZES | FAMILIES[request.param]
    model = {"arch": "causal_lm", "config": config, "router_z_loss_coef": 1e-3}
    workspace = project(Workspace(tmp_path_factory.mktemp(request.param), dataset), model)
    run = follow(workspace, "ddp@1", *TRAINING)
    losses = run.column("loss")
    assert losses[-1] < 0.9 * losses[0], "nothing was learned, so nothing was compared"
    return workspace, request.param, run


OTHERS = [
    "ddp@2", "fsdp@2", "zero2@2", "zero3@2", "megatron_tp2@2", "megatron_pp2@2", "megatron_tp2_sp@2",
    "zero3@4/2", "megatron_tp2_sp@4/2", "megatron_pp2@4/2",  # of 4 ranks, 2 share each sequence
    "megatron_ep2@2/2", "megatron_ep2_fsdp@2/2",  # which share the experts, too
]  # fmt: skip


@pytest.mark.parametrize("other", mostly_slow([*OTHERS, "ddp@1"], []))
def test_every_runner_trains_a_mixture_alike(reference: Any, other: str) -> None:
    workspace, _, one = reference
    other, _, sharing = other.partition("/")
    smaller = ("run.micro_batch_size=1",) if other == "ddp@1" else ()  # and so twice the accumulation
    shared = (f"run.runner.context_parallel={sharing}",) if sharing else ()
    run = follow(workspace, other, *TRAINING, *smaller, *shared, label=f"other{sharing}")
    assert_equal_training(one, run, TOLERANCE)
    for name in RECORDED:
        assert relative(run.column(name), one.column(name)) < TOLERANCE, name


@pytest.mark.slow
def test_documents_of_shared_sequences_are_balanced_alike(reference: Any) -> None:
    workspace, _, _ = reference
    uneven = ("datasets.tiny.seq_length=31", "datasets.tiny.document_mask=true")
    one = follow(workspace, "ddp@1", *TRAINING, *uneven, label="documents")
    two = follow(workspace, "ddp@2", *TRAINING, *uneven, "run.runner.context_parallel=2", label="documents")
    assert_equal_training(one, two, TOLERANCE)
    for name in RECORDED:
        assert relative(two.column(name), one.column(name)) < TOLERANCE, name
