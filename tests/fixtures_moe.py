"""Tiny mixtures of experts."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "num_experts_per_tok": 2,
    # Routers of tiny models that begin at the usual 0.02 are nearly tied, and rounding then sends tokens elsewhere.
    "initializer_range": 0.1,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "moe_intermediate_size": 24}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _SIZES | _EXPERTS | {"norm_topk_prob": True},
    "mixtral": _SIZES | {"num_local_experts": 4},
    "qwen2_moe": _SIZES | _EXPERTS | {"shared_expert_intermediate_size": 40},
    "olmoe": _SIZES | {"num_experts": 8},
    "deepseek_v3": _SIZES | {
        "n_routed_experts": 8, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gpt_oss": _SIZES | {"num_local_experts": 8, "sliding_window": 16, "head_dim": 8},
}  # fmt: skip


def mixture(family: str, **more: Any) -> dict[str, Any]:
    """`model` of a project: a tiny mixture of experts of this family."""
    return {"arch": "causal_lm", "config": {"model_type": family} | MIXTURES[family] | more}
