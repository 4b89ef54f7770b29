"""Tiny models of every family of causal language models that transformers has."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

# Families that sizes which fit most do not make small: they hold several models, or name their sizes otherwise.
NOT_TINY = [
    "blt", "cohere_compass_text", "dbrx", "dots3_note", "dots3_note_text", "emu3", "fuyu", "gemma3", "gemma3n",
    "gemma3n_text", "gemma4", "gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant", "git", "got_ocr2",
    "llama4", "mllama", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal", "qwen3_5",
    "qwen3_5_moe", "qwen4_exp", "qwen4_exp_text", "reformer", "zamba",
]  # fmt: skip
NEXT, ROWS = "does not predict the next token", "does not have one embedding per token"
REFUSED = {"cpmant": ROWS, "moshi": ROWS, "whisper": NEXT, "xlm": NEXT, "xlnet": NEXT}
# Encoders, which predict the next token as decoders only.
ENCODERS = [
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
]  # fmt: skip
# Families whose logits are more than a matrix product with a bias, a scale and a softcap.
OWN_HEADS = {*ENCODERS, "llama4_text", "modernbert-decoder", "prophetnet"} - {"bert-generation"}

BUILDS = [family for family in FAMILIES if family not in NOT_TINY]

_SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "d_model": 32, "ffn_dim": 64,
    "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "decoder_ffn_dim": 64, "encoder_ffn_dim": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "sliding_window": 16,
    "word_embed_proj_dim": 32, "rotary_dim": 4, "state_size": 8, "mamba_d_state": 8, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# What those sizes leave inconsistent.
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},  # the others recur
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "inkling2_loop_text": {"unpadded_vocab_size": 128},
    "inkling2_text": {"unpadded_vocab_size": 128},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "dots1": {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "gemma4_text": {"vocab_size_per_layer_input": 128, "global_head_dim": 8, "hidden_size_per_layer_input": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
}


def tiny(family: str) -> dict[str, Any]:
    """Small sizes, as `model.config` takes them, under the names that the family has for them."""
    cls = CONFIG_MAPPING[family]
    own = {field.name for field in fields(cls)}
    sizes = _SIZES | ({"num_key_value_heads": 4} if "kv_lora_rank" in own else {})  # as many heads as queries
    named = {cls.attribute_map.get(key, key): value for key, value in sizes.items()}
    kept = {key: value for key, value in named.items() if key in own}
    decoder = {"is_decoder": True} if family in ENCODERS else {}
    return {"model_type": family} | kept | _OWN.get(family, {}) | decoder
