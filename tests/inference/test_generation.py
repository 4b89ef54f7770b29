"""Text comes out the same with a cache and without, under a seed, and never holds a padding id."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.engine.runner import Runner
from crosstrain.inference.detokenizer import TextStream
from crosstrain.inference.generation import Sampling, as_prompt, choose, generate
from crosstrain.utils.errors import UserError
from crosstrain.utils.rng import generator
from crosstrain.utils.types import Sample
from fixtures_gpt2 import build


class Letters:
    """A tokenizer of code points, so that any id has text."""

    eos_token_id = 299

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(0x4E00 + i) for i in ids)


def asked(text: str) -> Sample:
    return as_prompt([ord(c) - 32 for c in text], Letters.eos_token_id)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return build()


def test_the_cache_changes_nothing(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(max_new_tokens=20, temperature=0.9, top_k=40, num_completions=3, seed=5)
    cached = generate(runner, Letters(), asked("hello"), sampling)
    monkeypatch.setattr(type(runner.model), "new_cache", lambda self: None)
    assert generate(runner, Letters(), asked("hello"), sampling) == cached


def test_a_completion_depends_on_the_seed_and_not_on_its_neighbours(runner: Runner) -> None:
    many = generate(runner, Letters(), asked("abc"), Sampling(max_new_tokens=12, num_completions=3, seed=1))
    assert generate(runner, Letters(), asked("abc"), Sampling(max_new_tokens=12, num_completions=1, seed=1)) == many[:1]
    assert generate(runner, Letters(), asked("abc"), Sampling(max_new_tokens=12, num_completions=3, seed=2)) != many
    assert len(set(many)) == 3


def test_streamed_pieces_are_the_text(runner: Runner) -> None:
    pieces: dict[int, str] = {0: "", 1: ""}

    def on_text(completion: int, piece: str) -> None:
        pieces[completion] += piece

    texts = generate(runner, Letters(), asked("abc"), Sampling(max_new_tokens=10, num_completions=2), on_text)
    assert list(pieces.values()) == texts


def test_padding_ids_have_no_logits(runner: Runner) -> None:
    assert runner.model.weights.parameters()["transformer.wte.weight"].shape[0] == 384
    with runner.evaluating():
        assert runner.evaluate({"input_ids": torch.zeros(1, 4, dtype=torch.long)}).shape == (1, 300)


def test_generation_ends_at_the_end_of_text(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter([5, 6, 299, 7, 8])

    def evaluate(batch: dict) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor([next(ids)]), 300).float() * 100

    monkeypatch.setattr(runner, "evaluate", evaluate)
    assert generate(runner, Letters(), asked("a"), Sampling(temperature=0)) == [Letters().decode([5, 6])]


def test_a_prompt_that_fills_the_model_is_refused_and_a_long_one_is_cut_short(runner: Runner) -> None:
    with pytest.raises(UserError, match="limit is 256; shorten the prompt"):
        generate(runner, Letters(), asked("a" * 256), Sampling())
    (text,) = generate(runner, Letters(), asked("a" * 250), Sampling(max_new_tokens=50, temperature=0))
    assert len(text) <= 6


@settings(deadline=None)
@given(st.integers(1, 50), st.floats(0.05, 1.0), st.integers(0, 2**31))
def test_top_k_and_top_p_keep_only_likely_tokens(k: int, p: float, seed: int) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed)) * 3
    probabilities = logits.softmax(-1)[0]
    order = probabilities.argsort(descending=True)
    allowed_k = set(order[:k].tolist())
    chosen = choose(logits.clone(), Sampling(top_k=k), [generator(seed)]).item()
    assert probabilities[chosen] >= probabilities[list(allowed_k)].min()
    before = probabilities[order].cumsum(0) - probabilities[order]
    allowed_p = set(order[before < p + 1e-6].tolist())
    assert choose(logits.clone(), Sampling(top_p=p), [generator(seed)]).item() in allowed_p


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"num_completions": 0}])
def test_impossible_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(UserError):
        Sampling(**wrong)


def bytes_tokenizer(text: bytes) -> SimpleNamespace:
    """One token for each byte, by its place."""
    return SimpleNamespace(decode=lambda ids: bytes(text[i] for i in ids).decode(errors="replace"))


def test_bytes_of_one_character_are_shown_together() -> None:
    stream = TextStream(bytes_tokenizer("é".encode()))
    assert [stream.push(0), stream.push(1)] == ["", "é"]


def test_half_a_character_is_shown_when_nothing_follows() -> None:
    stream = TextStream(bytes_tokenizer("aé".encode()))
    assert [stream.push(0), stream.push(1), stream.finish()] == ["a", "", "\N{REPLACEMENT CHARACTER}"]
    assert stream.text == "a\N{REPLACEMENT CHARACTER}"


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_a_stream_ends_before_the_first_stop_string_and_shows_none_of_it(text: str, stops: list[str]) -> None:
    stream = TextStream(bytes_tokenizer(text.encode()), stops)
    pieces = []
    for i in range(len(text)):
        pieces.append(stream.push(i))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    # The stop string that is complete first ends the text, where it begins.
    ends = [text.index(s) + len(s) for s in stops if s in text]
    seen = text[: min(ends)] if ends else text
    expected = seen[: min(seen.index(s) for s in stops if s in seen)] if ends else text
    assert "".join(pieces) == stream.text == expected
    assert stream.stopped == bool(ends)


def test_blanks_at_the_beginning_can_be_left_out() -> None:
    stream = TextStream(bytes_tokenizer(b" \n hi you"), strip=True)
    assert "".join(map(stream.push, range(9))) + stream.finish() == stream.text == "hi you"
