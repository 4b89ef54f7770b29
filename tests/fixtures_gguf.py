"""A tiny GGUF file of llama.cpp, written with the package gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

WIDTH, HEADS, KV_HEADS, MLP, LAYERS = 64, 4, 2, 96, 2
TOKENS = ["<end>", *"abcdefghij", "ab", "cd"]
MERGES = ["a b", "c d"]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of queries and keys: pairs of a rotation are neighbours."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, without: str = "") -> dict[str, np.ndarray]:
    """Write a Llama with some quantized tensors; the values that the file holds, under Hugging Face's names.

    without: a tensor that the file lacks.
    """
    gguf: Any = pytest.importorskip("gguf")
    writer, rng, values = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0), dict[str, np.ndarray]()
    writer.add_context_length(32)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)

    def add(name: str, theirs: str, shape: tuple[int, ...], heads: int = 0) -> None:
        if theirs == without:
            return
        value = rng.standard_normal(shape).astype(np.float32)
        stored = permuted(value, heads) if heads else value
        if len(shape) == 1:
            writer.add_tensor(theirs, stored)
            values[name] = value
            return
        packed = gguf.quants.quantize(stored, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(theirs, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        read = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        if heads:  # back to the order of Hugging Face
            read = read.reshape(heads, shape[0] // heads // 2, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        assert np.abs(read - value).max() < 0.02
        values[name] = read

    add("model.embed_tokens.weight", "token_embd.weight", (len(TOKENS), WIDTH))
    add("model.norm.weight", "output_norm.weight", (WIDTH,))
    add("lm_head.weight", "output.weight", (len(TOKENS), WIDTH))
    for n in range(LAYERS):
        kv = KV_HEADS * WIDTH // HEADS
        for name, theirs, shape, heads in (
            ("self_attn.q_proj", "attn_q", (WIDTH, WIDTH), HEADS),
            ("self_attn.k_proj", "attn_k", (kv, WIDTH), KV_HEADS),
            ("self_attn.v_proj", "attn_v", (kv, WIDTH), 0),
            ("self_attn.o_proj", "attn_output", (WIDTH, WIDTH), 0),
            ("mlp.gate_proj", "ffn_gate", (MLP, WIDTH), 0),
            ("mlp.up_proj", "ffn_up", (MLP, WIDTH), 0),
            ("mlp.down_proj", "ffn_down", (WIDTH, MLP), 0),
            ("input_layernorm", "attn_norm", (WIDTH,), 0),
            ("post_attention_layernorm", "ffn_norm", (WIDTH,), 0),
        ):
            add(f"model.layers.{n}.{name}.weight", f"blk.{n}.{theirs}.weight", shape, heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values
