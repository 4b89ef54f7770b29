"""Tokenizers: trained here or taken from Hugging Face or GPT-2 files; text survives them and never ends itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from crosstrain_plugins.builtin.commands.prepare.options import PrepareOptions
from crosstrain_plugins.builtin.commands.prepare.prepare import prepare
from crosstrain_plugins.builtin.commands.prepare.train_bpe import train_bpe
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import TEXTS
from crosstrain.data.tokenizer import cached_folder, load_cached, load_gpt2, load_tokenizer, warn_if_rebuilt
from crosstrain.utils.errors import DataError


def test_a_trained_tokenizer_ends_with_the_end_of_text() -> None:
    trained = train_bpe(TEXTS * 50, 280)
    assert (trained.vocab_size, trained.end_id, trained.end) == (280, 279, "<|endoftext|>")
    assert train_bpe(["ab"], 50257).vocab_size == 257  # nothing occurs twice


@settings(deadline=None)
@given(st.text())
def test_any_text_survives_encoding_and_is_never_an_end(tokenizer: Path, text: str) -> None:
    loaded, _ = load_cached(str(tokenizer))
    ids = loaded.encode(text + "<|endoftext|>")
    assert loaded.decode(ids) == text + "<|endoftext|>"
    assert loaded.end_id not in ids
    assert loaded.encode_batch([text, "", text]) == [loaded.encode(text), [], loaded.encode(text)]


def test_transformers_opens_what_was_saved(tokenizer: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    loaded = load_tokenizer(tokenizer)
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    assert (len(theirs), theirs.eos_token_id) == (loaded.vocab_size, loaded.end_id)
    assert [theirs(text).input_ids for text in TEXTS[:2]] == loaded.encode_batch(TEXTS[:2])
    assert theirs.decode(theirs(TEXTS[1]).input_ids) == TEXTS[1]


def test_gpt2_files_give_the_same_ids_as_tokenizer_json(tokenizer: Path, tmp_path: Path) -> None:
    loaded = load_tokenizer(tokenizer)
    loaded.backend.model.save(str(tmp_path))
    vocabulary = json.loads((tmp_path / "vocab.json").read_text()) | {loaded.end: loaded.end_id}  # as OpenAI's has it
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    for gpt2 in (load_tokenizer(tmp_path), load_gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt")):
        assert (gpt2.vocab_size, gpt2.end_id) == (loaded.vocab_size, loaded.end_id)
        assert gpt2.encode_batch(TEXTS) == loaded.encode_batch(TEXTS)


def test_files_of_another_family_are_left_to_transformers(tokenizer: Path, tmp_path: Path) -> None:
    loaded = load_tokenizer(tokenizer)
    loaded.backend.model.save(str(tmp_path))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    qwen = load_tokenizer(tmp_path)
    assert qwen.end == "<|im_end|>"
    assert qwen.decode(qwen.encode(TEXTS[1])) == TEXTS[1]
    qwen.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode_batch(TEXTS) == qwen.encode_batch(TEXTS)


def test_truncation_and_padding_left_in_a_file_are_ignored(tokenizer: Path, tmp_path: Path) -> None:
    backend = load_tokenizer(tokenizer).backend
    expected = backend.encode(TEXTS[0]).ids
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").encode_batch([TEXTS[0], "a"])[0] == expected


def test_a_tokenizer_is_cached_once_under_its_content(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cached_folder(load_tokenizer(tokenizer / "tokenizer.json"))
    assert cached_folder(load_tokenizer(tokenizer / "tokenizer.json")) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert load_tokenizer(folder).encode(TEXTS[0]) == load_tokenizer(tokenizer).encode(TEXTS[0])


def test_tokenizers_that_cannot_be_used_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|fin|>"}')
    with pytest.raises(DataError, match=r"no token '<\|fin\|>'"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"vocab\.json does not exist"):
        load_gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt")


def test_a_tokenizer_that_transformers_would_rebuild_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    train_bpe(["on 12345 mats"] * 50, 290).save(tmp_path / "t")  # Qwen's class would cut numbers into digits
    config = json.loads((tmp_path / "t" / "tokenizer_config.json").read_text())
    (tmp_path / "a.txt").write_text("on 12345 mats")
    for name, warned in (("PreTrainedTokenizerFast", False), ("GPT2Tokenizer", False), ("Qwen2Tokenizer", True)):
        (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": name}))
        prepare(PrepareOptions(input=str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "t")), tmp_path / name)
        assert ("encodes differently from the tokenizer.json" in caplog.text) == warned, name
        caplog.clear()
        load_cached.cache_clear()
        for _ in range(2):  # as datasets of conversations do; once
            load_cached(str(tmp_path / "t"))
            load_cached.cache_clear()
        assert caplog.text.count("encodes differently from the tokenizer.json") == warned, name
        caplog.clear()
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "t" / "config.json").write_text('{"model_type": "qwen2"}')  # for which transformers has that class
    prepare(PrepareOptions(input=str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "t")), tmp_path / "again")
    assert "encodes differently from the tokenizer.json" in caplog.text
    (tmp_path / "t" / "tokenizer.json").unlink()
    warn_if_rebuilt(str(tmp_path / "t"))  # an exported model without a tokenizer
