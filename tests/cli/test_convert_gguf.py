"""`crosstrain convert` of GGUF files: the values of the file, under the names of Hugging Face, with the tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from crosstrain.cli.main import main
from fixtures_gguf import KV_HEADS, WIDTH, write_gguf


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path)


def test_the_folder_has_the_files_values_and_tokenizer(
    written: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoConfig, AutoTokenizer

    path, values = written
    assert main(["convert", "--input", str(path), "--output", str(tmp_path / "folder")]) == 0
    said = capsys.readouterr().out
    assert "with the tokenizer and the 21 tensors" in said
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


def test_a_file_without_a_tensor_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers would draw the values at random."""
    write_gguf(tmp_path / "part.gguf", without="blk.1.attn_q.weight")
    assert main(["convert", "--input", str(tmp_path / "part.gguf"), "--output", str(tmp_path / "folder")]) == 1
    assert "it has no model.layers.1.self_attn.q_proj.weight" in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()
