"""The fast engine gives the tokenizer's own ids on any text, and stands back where nothing proves that it would."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from crosstrain_plugins.builtin.commands.prepare import fast_bpe as module
from crosstrain_plugins.builtin.commands.prepare.fast_bpe import FastEncoder
from crosstrain_plugins.builtin.commands.prepare.train_bpe import train_bpe
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from conftest import TEXTS
from crosstrain.data.tokenizer import TextTokenizer, load_tokenizer

CORPUS = [
    *TEXTS, "The towns' folk don't know, they've seen 1234567 sheep...\n\n\tdef f(x):\n        return x ** 2  \r\n" * 3,
    "Über die Brücke — naïve façade, l'été. 東京は日本の首都です。Привет, мир! مرحبا 🎉🎉",
    "aaaa aaaaaaa abababab bbbaaab",
]  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("plain")
    train_bpe(CORPUS * 4, 700).save(folder / "bpe")
    return load_tokenizer(folder / "bpe")


def changed(tokenizer: TextTokenizer, change: dict[str, Any]) -> TextTokenizer:
    """The tokenizer with parts of its description replaced, given as {"model.merges": ...}."""
    document = json.loads(tokenizer.backend.to_str())
    for key, value in change.items():
        place = document
        *way, last = key.split(".")
        for name in way:
            place = place[name]
        place[last] = value
    return TextTokenizer(Tokenizer.from_str(json.dumps(document)), tokenizer.end, lambda folder: None)


def like_qwen(plain: TextTokenizer, pattern: str) -> TextTokenizer:
    backend = Tokenizer.from_str(plain.backend.to_str())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return TextTokenizer(backend, plain.end, lambda folder: None)


def same(tokenizer: TextTokenizer, texts: list[str]) -> bool:
    return [ids.tolist() for ids in FastEncoder(tokenizer).encode(texts)] == tokenizer.encode_batch(texts)


TEXT = st.text(max_size=60) | st.text("ab \n'sdt1٣é\u0301\u017fK\u200b\u00a0\u2028🎉東<tool>|endoftx", max_size=80)


@settings(deadline=None, max_examples=300)
@given(st.lists(TEXT, max_size=5))
def test_ids_are_the_tokenizers_own_on_any_text(plain: TextTokenizer, texts: list[str]) -> None:
    assert FastEncoder(plain).fast is not None
    assert same(plain, texts)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.lists(TEXT, max_size=5), st.sampled_from([module._LLAMA3, module._QWEN2]))
def test_ids_are_equal_for_the_other_ways_to_cut_words(plain: TextTokenizer, texts: list[str], pattern: str) -> None:
    tokenizer = like_qwen(plain, pattern)
    assert FastEncoder(tokenizer).fast is not None
    assert same(tokenizer, texts)


def test_ids_are_equal_on_long_runs_and_on_what_the_engine_cannot_take(plain: TextTokenizer) -> None:
    assert same(plain, [character * 20_000 for character in ("a", " ", "\n", "é", "1", ".", "東")])
    assert same(plain, [" " * 1_100_000 + "a", *CORPUS])


def test_every_character_is_cut_alike(plain: TextTokenizer) -> None:
    """In several neighbourhoods; those on which Unicode tables may differ go to the tokenizer."""
    codes = [c for c in range(sys.maxunicode + 1) if not 0xD800 <= c <= 0xDFFF]
    step = 509  # a prime; the slow test takes all
    for tokenizer in (plain, like_qwen(plain, module._LLAMA3)):
        assert same(tokenizer, ["".join(f"a{chr(c)}a {chr(c)}1{chr(c)}.\n" for c in codes[::step])])


@pytest.mark.slow
def test_every_single_character_is_cut_alike(plain: TextTokenizer) -> None:
    codes = [c for c in range(sys.maxunicode + 1) if not 0xD800 <= c <= 0xDFFF]
    lines = [f"a{chr(c)}a {chr(c)}1{chr(c)}.\n" for c in codes]
    texts = ["".join(lines[k : k + 64]) for k in range(0, len(lines), 64)]
    for tokenizer in (plain, like_qwen(plain, module._LLAMA3), like_qwen(plain, module._QWEN2)):
        assert same(tokenizer, texts)


def test_what_nothing_proves_is_left_to_the_tokenizer(plain: TextTokenizer) -> None:
    vocabulary: dict[str, int] = json.loads(plain.backend.to_str())["model"]["vocab"]
    merges = json.loads(plain.backend.to_str())["model"]["merges"]
    doubtful: list[dict[str, Any]] = [
        {"model.merges": merges[:-1]},  # a token that no merge makes
        {"model.merges": merges[::-1]},  # parts that are not there yet
        {"model.dropout": 0.1},
        {"pre_tokenizer.add_prefix_space": True},
        {"pre_tokenizer.use_regex": False},
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
    ]
    for change in doubtful:
        tokenizer = changed(plain, change)
        assert FastEncoder(tokenizer).fast is None, change
        assert same(tokenizer, CORPUS) or "dropout" in str(change)
    assert vocabulary


def test_a_token_that_its_own_merges_do_not_reach_is_noticed(plain: TextTokenizer) -> None:
    """b+c goes before a+b, so "abc" becomes a, bc: tiktoken, which knows no pairs, would join them."""
    letters = dict.fromkeys(module._byte_characters())
    vocabulary = {token: number for number, token in enumerate([*letters, "bc", "ab", "abc", plain.end])}
    change = {
        "model.vocab": vocabulary, "model.merges": [["b", "c"], ["a", "b"], ["ab", "c"]],
        "added_tokens": [t | {"id": vocabulary[plain.end]} for t in json.loads(plain.backend.to_str())["added_tokens"]],
    }  # fmt: skip
    tokenizer = changed(plain, change)
    assert tokenizer.backend.encode("abc").tokens == ["a", "bc"]
    assert FastEncoder(tokenizer).fast is None
    sound = changed(plain, change | {"model.merges": [["b", "c"], ["a", "b"], ["a", "bc"]]})
    assert FastEncoder(sound).fast is not None
    assert same(sound, ["abc", "ab", "aabcbc"])


def test_without_tiktoken_the_tokenizer_does_it(
    plain: TextTokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert FastEncoder(plain).fast is None
    assert same(plain, CORPUS)
