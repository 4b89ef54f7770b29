"""Causal attention with dropout on a CPU: torch's function where nothing is dropped, and its own mask's derivative."""

from __future__ import annotations

import pytest
import torch
from crosstrain_plugins.builtin.models.hugging_face import attention, cpu_attention
from torch import Tensor, nn

attend = cpu_attention.attention
LENGTHS = [1, 5, 128, 300]  # within a block of queries, exactly one, several
RATE = 0.25


def tensors(length: int, dtype: torch.dtype, heads: int = 3, width: int = 8) -> list[Tensor]:
    rng = torch.Generator().manual_seed(length)
    return [torch.randn(2, heads, length, width, generator=rng).to(dtype).requires_grad_() for _ in range(4)]


def with_gradients(function: object, *arguments: Tensor) -> list[Tensor]:
    *inputs, grad = arguments
    out = function(*inputs)  # type: ignore[operator]
    return [out, *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize("length", LENGTHS)
# Sums in another order; of bf16, probabilities and scores rounded to it, as by attention without a fused kernel.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_without_a_rate_it_is_torchs(length: int, dtype: torch.dtype, tolerance: float) -> None:
    given = tensors(length, dtype)

    def theirs(*x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*x, is_causal=True, scale=0.3)

    exact = with_gradients(theirs, *(t.detach().double().requires_grad_() for t in given))
    for mine, right in zip(with_gradients(lambda *x: attend(*x, 0.3, 0.0), *given), exact, strict=True):
        assert (mine - right).norm() <= tolerance * right.norm() + 1e-12


@pytest.mark.parametrize("length", [5, 130])
def test_gradients_are_those_of_the_mask_that_was_drawn(length: int) -> None:
    *inputs, _ = tensors(length, torch.double, heads=1, width=2)

    def seeded(*x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return attend(*x, 0.5, RATE)

    # Keys and values sum over queries in fp64 here, so this is the arithmetic of any type.
    assert torch.autograd.gradcheck(seeded, inputs, fast_mode=True)


def test_each_probability_is_dropped_at_the_rate_and_the_rest_is_scaled() -> None:
    """Equal scores, and a value that tells the keys apart: what comes out is the mask."""
    length = 256
    zeros = torch.zeros(16, 1, length, length)
    out = attend(zeros, zeros, torch.eye(length).expand_as(zeros), 1.0, RATE)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    assert not out[..., ~seen].any()
    kept = out * torch.arange(1, length + 1)[:, None]
    assert torch.allclose(kept[kept > 0], torch.tensor(1 / (1 - RATE)))
    share = (kept == 0)[..., seen].float()
    # Half a million draws have a standard deviation of 0.0006; those of a head 0.0024.
    assert abs(share.mean() - RATE) < 0.003
    assert (share.mean(-1) - RATE).abs().max() < 0.012
    assert len(torch.unique(kept == 0, dim=0)) == 16  # no two heads draw alike
    columns = (kept == 0)[..., -1, :].float().mean((0, 1))
    assert columns.std() < 0.15  # sqrt(RATE (1 - RATE) / 16) = 0.11: no column, and no place within 64 bits, is special


def test_models_use_it_for_dropout_and_for_short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        cpu_attention,
        "attention",
        lambda *x: calls.append((x[0].shape[2], *x[3:])) or attend(*x),  # type: ignore[func-returns-value]
    )
    for length, dropout, dtype, masked in (
        (16, 0.1, torch.float32, False), (16, 0.0, torch.float32, False), (16, 0.0, torch.bfloat16, False),
        (600, 0.1, torch.float32, False), (600, 0.0, torch.bfloat16, False), (16, 0.1, torch.float32, True),
    ):  # fmt: skip
        *given, _ = tensors(length, dtype)
        mask = torch.ones(length, length, dtype=torch.bool).tril() if masked else None
        attention._sdpa(nn.Module(), *given, mask, dropout=dropout)
    assert calls == [(16, 8**-0.5, 0.1), (16, 8**-0.5, 0.0), (600, 8**-0.5, 0.1)]


def test_queries_and_keys_in_fp32_are_rounded_to_the_values_precision() -> None:
    """As torch's function under autocast; GPT-NeoX's rotary positions leave such queries and keys."""
    query, key, value, grad = tensors(130, torch.bfloat16)
    wide = [query.detach().float().requires_grad_(), key.detach().float().requires_grad_()]
    results = []
    for inputs in ([query, key, value], [*wide, value]):
        torch.manual_seed(1)
        results.append(with_gradients(lambda *x: attend(*x, 0.5, RATE), *inputs, grad))
    for narrow, mixed in zip(*results, strict=True):
        assert torch.equal(narrow, mixed.to(narrow.dtype))
