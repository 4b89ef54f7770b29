"""Facts about families of transformers' causal language models that only their code tells (seen with 5.24).

A family that is not here trains with the library's own head, which computes all logits.
"""

# Families, by model_type, whose logits are a matrix product of the hidden states, with or without a bias.
_PLAIN = {
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba", "bart", "bert-generation",
    "bigbird_pegasus", "biogpt", "bitnet", "blenderbot", "blenderbot-small", "bloom", "codegen", "ctrl", "cwm",
    "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "diffllama", "doge", "dots1",
    "dots3_note_text", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "falcon", "falcon_mamba",
    "flex_olmo", "flint", "gemma", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt-sw3", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "helium", "hrm_text",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "internlm3", "iquestcoder", "jais2", "jamba", "jetmoe",
    "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "llama", "longcat_flash", "mamba",
    "mamba2", "marian", "mbart", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text",
    "ministral", "ministral3", "mistral", "mixtral", "moshi", "mpt", "mvp", "nemotron", "nemotron_h", "olmo",
    "olmo2", "olmo3", "olmo_hybrid", "olmoe", "openai-gpt", "opt", "pegasus", "persimmon", "phi", "phi3", "phimoe",
    "plbart", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next",
    "qwen4_exp_text", "rwkv", "sarvam_mla", "sarvam_moe", "seed_oss", "smollm3", "solar_open", "stablelm",
    "starcoder2", "trocr", "xglm", "youtu", "zamba", "zamba2", "zaya",
}  # fmt: skip

# Attributes of configurations that multiply the logits, with an exponent, and those that are a softcap of them.
_SCALES = {
    ("logit_scale", 1): "cohere cohere2 cohere2_moe cohere_compass_text",
    ("logits_scaling", -1): "granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared",
    ("logits_scaling", 1): "hyperclovax",
    ("lm_head_multiplier", 1): "falcon_h1",
    ("logits_mup_width_multiplier", -1): "inkling_text",
}
_SOFTCAPS = {
    "final_logit_softcapping": (
        "beam gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text nanochat vaultgemma"
    ),
    "logits_soft_cap": "recurrent_gemma",
    "output_logit_soft_cap": "xlstm",
}
SCALES = {family: attribute for attribute, families in _SCALES.items() for family in families.split()}
SOFTCAPS = {family: attribute for attribute, families in _SOFTCAPS.items() for family in families.split()}
PRODUCTS = {*_PLAIN, *SCALES, *SOFTCAPS}

NOT_CAUSAL = {"whisper", "xlm", "xlnet"}  # attend to later tokens, or leave it to others to shift the labels

# Families that compare the name of the attention implementation with "sdpa", and so keep transformers' own.
COMPARE_NAMES = {
    "axk2", "deepseek_v32", "dots3_note_text", "falcon", "gemma4_text", "gemma4_unified_text", "glm5_next",
    "glm_moe_dsa", "hy_v4", "minimax_m3_vl_text", "mistral_large4",
}  # fmt: skip

# Keys that configurations read beside their fields: of all families, and older names of some.
READ_BY_ALL = {
    "num_labels", "output_attentions", "partial_rotary_factor", "per_layer_config", "rope_parameters", "rope_scaling",
    "rope_theta", "experts_implementation", "torch_dtype",
}  # fmt: skip
_OLDER = {
    "n_embed": "bloom falcon",
    "first_k_dense_replace": "axk1 axk2 cohere2_moe dots3_note_text kimi_linear",
    "moe_layer_freq": "axk1 axk2 dots3_note_text minimax_m3_vl_text",
    "full_attention_interval": "qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text",
    "sliding_window_pattern": "cohere2 cohere_compass_text gemma3_text",
    "num_experts": "deepseek_v32 glm_moe_dsa",
    "sliding_window_size": "dots3_note_text mimo_v2_flash",
    "rope_local_base_freq": "gemma3_text gemma3n_text",
    "global_head_dim num_global_key_value_heads": "gemma4_text gemma4_unified_text",
    "rotary_pct rotary_emb_base": "gpt_neox gpt_neox_japanese",
    "tie_embedding": "lfm2 lfm2_moe",
    "block_ff_dim": "lfm2",
    "layer_types": "ministral3 mistral",
    "rotary_dim": "minimax_m2",
    "attention_factor compress_ratios compress_rate_hca compress_rate_csa": "deepseek_v4",
    "num_hash_layers qk_rope_head_dim": "deepseek_v4",
    "index_topk_pattern index_topk_freq index_skip_topk_offset": "glm_moe_dsa",
    "swa_qk_rope_head_dim swa_rope_theta use_dsa use_sliding_window": "dots3_note_text",
    "moe_shared_expert_intermediate_size": "dots3_note_text",
    "use_falcon_mambapy": "falcon_mamba",
    "loop_config num_passes core_start core_end gate_rank": "inkling2_loop_text",
    "dense_intermediate_size dense_mlp_idx": "inkling_text",
    "linear_attn_config kda_layers full_attn_layers num_heads short_conv_kernel_size": "kimi_linear",
    "sparse_attention_config sparse_index_dim sparse_block_size sparse_attention_freq": "minimax_m3_vl_text",
    "sparse_num_index_heads sparse_local_block sparse_topk_blocks": "minimax_m3_vl_text",
    "global_attn_every_n_layers global_rope_theta local_rope_theta": "modernbert-decoder",
    "codebook_size": "moshi",
    "hybrid_override_pattern mtp_hybrid_override_pattern mamba_dt_limit mamba_dt_min mamba_dt_max": "nemotron_h",
    "mamba_dt_init_floor mamba_chunk_size mamba_conv_bias mamba_expand mamba_n_groups mamba_d_conv": "nemotron_h",
    "q_head_dim": "sarvam_mla",
}


def keys_beside_fields(family: str) -> set[str]:
    """Keys that the configuration of a family reads beside its fields."""
    older = [keys.split() for keys, families in _OLDER.items() if family in families.split()]
    return READ_BY_ALL.union(*older)
