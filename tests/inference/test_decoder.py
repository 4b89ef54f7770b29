"""Sequences that are computed together come to what each comes to alone, up to rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from crosstrain_plugins.builtin.datasets.vision.conversations import IMAGE_ID

from conftest import Workspace
from crosstrain.engine.runner import Runner
from crosstrain.inference.decoder import BLOCK, Decoder, DecodeState
from crosstrain.utils.types import Sample
from fixtures_gpt2 import build
from fixtures_qwen import build as build_qwen
from fixtures_qwen import use
from fixtures_ranks import mostly_slow
from fixtures_vision import build as build_sight
from fixtures_vision import shapes, write_project

SIZE = 4
TOKENS = np.random.default_rng(5).integers(0, 60, 12).tolist()  # not greedy ones, which rounding can change


def prompt(length: int, seed: int) -> Sample:
    return {"input_ids": np.random.default_rng(seed).integers(0, 60, length)}


def grow(decoder: Decoder, slot: int, sample: Sample, others: dict[int, Sample]) -> list[torch.Tensor]:
    """Logits of a slot that grows by `TOKENS` while others come, grow greedily and go."""
    found = [decoder.start([slot], sample)]
    tokens: dict[int, int] = {}
    for step, token in enumerate(TOKENS):
        for other, its in others.items():
            if step == other:  # each begins at another time
                tokens[other] = int(decoder.start([other], its).argmax())
            if step == other + 5:
                del tokens[other]
                decoder.free(other)
        tokens[slot] = token
        logits = decoder.step(tokens)
        tokens |= {s: int(value.argmax()) for s, value in logits.items()}
        found.append(logits[slot])
    decoder.free(slot)
    return found


def check(runner: Runner, sample: Sample, tolerance: float = 1e-5) -> None:
    # The longest neighbour comes and goes, and with it the number of keys that all are shown.
    others = {1: prompt(3, 1), 2: prompt(BLOCK + 8, 2), 3: prompt(7, 3)}
    with runner.evaluating():
        decoder = Decoder(runner, SIZE)
        assert decoder._kv is not None
        alone = grow(decoder, 0, sample, {})
        beside = grow(decoder, 0, sample, others)
        elsewhere = grow(decoder, 3, sample, {k - 1: v for k, v in others.items()})
        plain = DecodeState(runner, [sample])
        expected = []
        for token in TOKENS:
            expected.append(plain.logits()[0])
            plain.append(torch.tensor([token]))
        expected.append(plain.logits()[0])
    # Sums in another order: another shape, another row of a product that threads split, or more keys.
    for found in (beside, elsewhere, expected):
        for a, b in zip(alone, found, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("attention", mostly_slow(["sdpa", "eager"], ["sdpa"]))
def test_gpt2(attention: str) -> None:
    check(build(f"model.attention={attention}"), prompt(9, 0))
    check(build(f"model.attention={attention}"), prompt(BLOCK - 5, 0))


BF16 = 0.02  # 8 bits of logits below 1, and what two layers make of a last bit


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(("amp", "tolerance"), [("fp32", 1e-5), pytest.param("bf16", BF16, marks=pytest.mark.slow)])
def test_qwen(workspace: Workspace, family: str, amp: str, tolerance: float) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    workspace.config["run"]["amp"] = amp
    use(workspace, family=family, vocab_size=320, num_key_value_heads=2, max_position_embeddings=256, **sizes)
    check(build_qwen(workspace), prompt(9, 0), tolerance)


@pytest.mark.slow
def test_gpt2_in_bf16() -> None:
    check(build("run.amp=bf16"), prompt(9, 0), BF16)


def test_a_model_that_sees(tmp_path: Path, words: Path) -> None:
    runner = build_sight(write_project(tmp_path / "project.yaml", shapes(tmp_path, tokenizer=str(words))))
    ids = np.concatenate([prompt(3, 0)["input_ids"], [IMAGE_ID] * 4, prompt(3, 1)["input_ids"]])
    pixels = np.random.default_rng(0).normal(size=(1, 3, 16, 16)).astype(np.float32)
    check(runner, {"input_ids": ids, "pixel_values": pixels})


@pytest.mark.parametrize("cached", [True, False])
def test_models_whose_cache_is_of_another_kind_are_computed_one_after_another(
    monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    runner = build()
    together = build()
    if cached:
        runner.model.takes_positions = False
    else:
        monkeypatch.setattr(type(runner.model), "new_cache", lambda self: None)
    with runner.evaluating():
        decoder = Decoder(runner, SIZE)
        assert decoder._kv is None
        alone = grow(decoder, 0, prompt(9, 0), {})
        beside = grow(decoder, 0, prompt(9, 0), {1: prompt(3, 1), 2: prompt(8, 2)})
    monkeypatch.undo()
    with together.evaluating():
        expected = grow(Decoder(together, SIZE), 0, prompt(9, 0), {})
    for a, b, c in zip(alone, beside, expected, strict=True):
        assert torch.equal(a, b)  # the same products in the same shapes
        assert torch.allclose(a, c, rtol=1e-4, atol=1e-5)
