"""`crosstrain convert` of GGUF files: the values of the file, under the names of Hugging Face, with the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from crosstrain.cli.main import main

WIDTH, HEADS, KV_HEADS, MLP, LAYERS = 64, 4, 2, 96, 2
TOKENS = ["<end>", *"abcdefghij", "ab", "cd"]
MERGES = ["a b", "c d"]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of queries and keys: pairs of a rotation are neighbours."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A GGUF file with some quantized tensors, and the values that it holds, under Hugging Face's names."""
    gguf: Any = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
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
    return path, values


def test_the_folder_has_the_files_values_and_tokenizer(
    written: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoConfig, AutoTokenizer

    path, values = written
    assert main(["convert", "--input", str(path), "--output", str(tmp_path / "folder")]) == 0
    said = capsys.readouterr().out
    assert "wrote 21 tensors" in said
    assert "16 are quantized (16 in Q8_0)" in said
    found = load_file(tmp_path / "folder" / "model.safetensors")
    assert found.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    config = AutoConfig.from_pretrained(tmp_path / "folder")
    assert (config.model_type, config.num_key_value_heads, config.hidden_size) == ("llama", KV_HEADS, WIDTH)
    assert getattr(config, "quantization_config", None) is None
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer("abcde", add_special_tokens=False)["input_ids"] == [11, 12, 5]


def test_a_damaged_file_is_one_sentence(
    written: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(written[0].read_bytes()[:500])
    assert main(["convert", "--input", str(damaged), "--output", str(tmp_path / "folder")]) == 1
    assert capsys.readouterr().err.startswith(f"error: {damaged}: transformers cannot read it")
    assert not (tmp_path / "folder").exists()


def test_the_model_option_names_the_command(tmp_path: Path) -> None:
    from crosstrain.modeling.pretrained import pretrained_folder
    from crosstrain.utils.errors import CheckpointError

    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="a GGUF file; write it as a folder with `crosstrain convert"):
        pretrained_folder(str(tmp_path / "a.gguf"))
