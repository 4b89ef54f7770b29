"""The chunked loss is plain cross-entropy in value and gradients, and neither builds all logits nor is slower."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from crosstrain.modeling.cross_entropy import PRODUCTS, Logits, token_cross_entropy

HIDDEN, VOCAB, PADDED = 24, 90, 96


def make(tokens: int, seed: int = 0, ignored: float = 0.2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Hidden states [tokens, H], a padded head and labels of which a share is ignored."""
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=rng, dtype=dtype, requires_grad=True)
    weight = torch.randn(PADDED, HIDDEN, generator=rng, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCAB, (tokens,), generator=rng)
    labels[torch.rand(tokens, generator=rng) < ignored] = -100
    return hidden, weight, labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int = VOCAB) -> Tensor:
    """The definition, in fp64."""
    logits = F.linear(hidden.double(), weight.double())[..., :vocab_size]
    return F.cross_entropy(logits.reshape(-1, vocab_size), labels.reshape(-1), reduction="sum")


def relative(a: Tensor, b: Tensor) -> float:
    """Distance of a from b in units of b's norm (absolute where b is zero)."""
    norm = b.double().norm().item()
    return (a.double() - b.double()).norm().item() / (norm or 1.0)


def assert_matches(loss: Tensor, expected: Tensor, inputs: tuple[Tensor, ...], tolerance: float) -> None:
    """Value and gradients, the latter under an incoming gradient that is not one."""
    assert relative(loss, expected) < tolerance
    for got, want in zip(
        torch.autograd.grad(loss * 0.37, inputs), torch.autograd.grad(expected * 0.37, inputs), strict=True
    ):
        assert got.dtype == want.dtype
        # The gradient of a logit is p or p - 1. Near p = 1 it is small, but has the rounding error of p, so that a
        # gradient of norm below 1 is compared absolutely.
        assert (got.double() - want.double()).norm().item() < tolerance * max(want.double().norm().item(), 1.0)


class CountProducts(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 70), st.integers(1, 80), st.integers(0, 1000), st.sampled_from([0.0, 0.3, 1.0]))
def test_is_cross_entropy_for_every_chunk_size(tokens: int, chunk: int, seed: int, ignored: float) -> None:
    hidden, weight, labels = make(tokens, seed, ignored)
    loss = token_cross_entropy(hidden, weight, labels, vocab_size=VOCAB, chunk_tokens=chunk)
    assert loss.dtype == torch.float32
    # Logits reach 20, so their rounding errors of 6e-8 reach 1.2e-6, and those of p as well.
    assert_matches(loss, plain(hidden, weight, labels), (hidden, weight), 3e-6)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 40), st.integers(1, 50), st.integers(0, 1000), st.floats(0.05, 4.0),
    st.sampled_from([None, 2.0, 30.0]), st.booleans(),
)  # fmt: skip
def test_logits_may_have_a_bias_a_scale_and_a_softcap(
    tokens: int, chunk: int, seed: int, scale: float, softcap: float | None, biased: bool
) -> None:
    hidden, weight, labels = make(tokens, seed)
    bias = torch.randn(PADDED, generator=torch.Generator().manual_seed(seed), requires_grad=True) if biased else None
    loss = token_cross_entropy(
        hidden, weight, labels, vocab_size=VOCAB, chunk_tokens=chunk, logits=Logits(bias, scale, softcap)
    )
    logits = scale * F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())[:, :VOCAB]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits, labels, reduction="sum")
    inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
    # A scale multiplies the logits' rounding. The slope of a capped logit, 1 - tanh^2, loses a digit or two of fp32's
    # seven where it is small.
    assert_matches(loss, expected, inputs, 3e-6 * max(1.0, scale) if softcap is None else 1e-5)


def test_a_bias_of_zeros_and_a_scale_of_one_change_no_bit() -> None:
    hidden, weight, labels = make(40)
    results = []
    for logits in (PRODUCTS, Logits(bias=torch.zeros(PADDED)), Logits(scale=1.0)):
        loss = token_cross_entropy(hidden, weight, labels, vocab_size=VOCAB, chunk_tokens=16, logits=logits)
        results.append([loss, *torch.autograd.grad(loss, (hidden, weight))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("shape", [(), (12,), (3, 4), (2, 3, 2)])
def test_takes_any_leading_shape(shape: tuple[int, ...]) -> None:
    hidden, weight, labels = make(12, ignored=0.1)
    count = max(1, torch.Size(shape).numel())
    hidden, labels = hidden[:count].reshape(*shape, HIDDEN), labels[:count].reshape(shape)
    assert_matches(
        token_cross_entropy(hidden, weight, labels, vocab_size=VOCAB),
        plain(hidden, weight, labels),
        (hidden, weight),
        1e-6,
    )


def test_without_a_vocab_size_every_row_is_a_token() -> None:
    hidden, weight, labels = make(10)
    labels[0] = PADDED - 1
    assert_matches(
        token_cross_entropy(hidden, weight, labels), plain(hidden, weight, labels, PADDED), (hidden, weight), 1e-6
    )


def test_padding_rows_change_nothing_and_receive_nothing() -> None:
    hidden, weight, labels = make(30)
    before = token_cross_entropy(hidden, weight, labels, vocab_size=VOCAB)
    with torch.no_grad():
        weight[VOCAB:] = 1000.0
    after = token_cross_entropy(hidden, weight, labels, vocab_size=VOCAB)
    assert torch.equal(before, after)
    (gradient,) = torch.autograd.grad(after, weight)
    assert not gradient[VOCAB:].any()


def test_stays_exact_for_confident_and_for_hopeless_predictions() -> None:
    hidden, weight, labels = make(40)
    for scale in (1e-3, 30.0, 300.0):  # at 300 most targets' probabilities are zero in fp32, their losses are not
        scaled = (hidden * scale).detach().requires_grad_()
        assert_matches(
            token_cross_entropy(scaled, weight, labels, vocab_size=VOCAB),
            plain(scaled, weight, labels),
            (scaled, weight),
            2e-6,
        )


def test_keeps_the_precision_of_fp64() -> None:
    hidden, weight, labels = make(30, dtype=torch.float64)
    loss = token_cross_entropy(hidden, weight, labels, vocab_size=VOCAB, chunk_tokens=4)
    assert_matches(loss, plain(hidden, weight, labels), (hidden, weight), 1e-14)


@pytest.mark.parametrize("chunk", [16, 50, 1000])
def test_under_bf16_autocast_only_the_matrix_products_lose_precision(chunk: int) -> None:
    """bf16 rounds inputs, logits and logits' gradients by up to 2^-9 each; sums over chunks must add nothing to that.

    So the plain loss under the same autocast is the measure: the same value, gradients as close to fp64's.
    """
    hidden, weight, labels = make(200)
    with torch.autocast("cpu", torch.bfloat16):
        ours = token_cross_entropy(hidden, weight, labels, vocab_size=VOCAB, chunk_tokens=chunk)
        usual = F.cross_entropy(F.linear(hidden, weight)[:, :VOCAB].float(), labels, reduction="sum")
    assert ours.dtype == torch.float32
    assert relative(ours, usual) < 1e-6
    gradients = (torch.autograd.grad(loss, (hidden, weight)) for loss in (ours, usual, plain(hidden, weight, labels)))
    for got, theirs, exact in zip(*gradients, strict=True):
        assert relative(got, exact) < 1.1 * relative(theirs, exact) < 0.02


@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**32])
def test_fp16_gradients_neither_vanish_nor_overflow_at_any_loss_scale(scale: float) -> None:
    """Probabilities of 1e-9, far below fp16's smallest number, must still reach the gradient of their tokens' rows."""
    hidden, weight, labels = make(64, ignored=0.0)
    with torch.no_grad():
        hidden *= 0.1
        hidden[:, 0], weight[:, 0] = 4.0, 0.0
        weight[50:VOCAB, 0] = -4.0  # tokens 50 to 89 have about e^-16 of the others' probability
        labels %= 50
    with torch.autocast("cpu", torch.float16):
        loss = token_cross_entropy(hidden, weight, labels, vocab_size=VOCAB, chunk_tokens=20)
    got = [g.double() / scale for g in torch.autograd.grad(loss * scale, (hidden, weight))]
    want = torch.autograd.grad(plain(hidden, weight, labels), (hidden, weight))
    assert relative(got[0], want[0]) < 1e-2
    assert relative(got[1], want[1]) < 1e-2
    assert relative(got[1][50:VOCAB], want[1][50:VOCAB]) < 5e-2


def test_frozen_inputs_get_no_gradient_and_cost_no_work() -> None:
    hidden, weight, labels = make(20)
    for h, w, trained in ((hidden, weight.detach(), hidden), (hidden.detach(), weight, weight)):
        with CountProducts() as products:
            loss = token_cross_entropy(h, w, labels, vocab_size=VOCAB)
        assert products.count == 2
        (got,) = torch.autograd.grad(loss, trained)
        (want,) = torch.autograd.grad(plain(h, w, labels), trained)
        assert relative(got, want) < 1e-6


def test_evaluation_does_no_gradient_work() -> None:
    hidden, weight, labels = make(20)
    with torch.no_grad(), CountProducts() as products:
        loss = token_cross_entropy(hidden, weight, labels, vocab_size=VOCAB)
    assert products.count == 1
    assert not loss.requires_grad
    assert relative(loss, plain(hidden, weight, labels)) < 1e-6


def test_a_tied_weight_gets_both_gradients() -> None:
    _, weight, labels = make(20)
    tokens = torch.arange(20)
    loss = token_cross_entropy(F.embedding(tokens, weight), weight, labels, vocab_size=VOCAB, chunk_tokens=6)
    expected = plain(F.embedding(tokens, weight), weight, labels)
    assert_matches(loss, expected, (weight, weight), 1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_works_under_activation_checkpointing(reentrant: bool) -> None:
    hidden, weight, labels = make(20)
    loss = checkpoint(
        lambda h: token_cross_entropy(h * 2, weight, labels, vocab_size=VOCAB), hidden, use_reentrant=reentrant
    )
    loss.backward()
    expected = torch.autograd.grad(plain(hidden * 2, weight, labels), (hidden, weight))
    assert relative(hidden.grad, expected[0]) < 1e-6
    assert relative(weight.grad, expected[1]) < 1e-6


def test_a_second_backward_is_an_error_rather_than_wrong() -> None:
    hidden, weight, labels = make(20)
    loss = token_cross_entropy(hidden, weight, labels)
    (loss * 2).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss * 3).backward()


def test_mistakes_are_named() -> None:
    hidden, weight, labels = make(20)
    with pytest.raises(ValueError, match="do not match"):
        token_cross_entropy(hidden, weight, labels[:-1])
    with pytest.raises(ValueError, match="do not match"):
        token_cross_entropy(hidden[:, :-1], weight, labels)
    with pytest.raises(ValueError, match="chunk_tokens"):
        token_cross_entropy(hidden, weight, labels, chunk_tokens=0)
    with pytest.raises(RuntimeError, match="out of bounds"):
        token_cross_entropy(hidden, weight, labels.fill_(PADDED))


def test_no_tensor_is_as_large_as_all_logits() -> None:
    hidden, weight, labels = make(512)
    with LargestTensor() as seen:
        token_cross_entropy(hidden, weight, labels, vocab_size=VOCAB, chunk_tokens=32).backward()
    assert seen.numel == 512 * HIDDEN  # nothing larger than the hidden states; all logits are four times that


def test_peak_memory_is_a_fraction_of_the_plain_losss() -> None:
    """In a process of its own, whose peak only grows: ours first, so the plain loss must raise it."""
    script = """
import re, torch, torch.nn.functional as F
from crosstrain.modeling.cross_entropy import token_cross_entropy
hidden, weight = torch.randn(1024, 16, requires_grad=True), torch.randn(20000, 16, requires_grad=True)
labels = torch.randint(0, 20000, (1024,))
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
token_cross_entropy(hidden[:2], weight, labels[:2]).backward()
start = peak()
token_cross_entropy(hidden, weight, labels, chunk_tokens=128).backward()
ours = peak()
F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum").backward()
print(ours - start, peak() - start)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    ours, usual = map(int, out.stdout.split())
    assert ours < usual / 3


@pytest.mark.slow
@pytest.mark.parametrize("amp", [False, True])
def test_is_not_slower_than_the_plain_loss(amp: bool) -> None:
    hidden, weight = torch.randn(1024, 256, requires_grad=True), torch.randn(50304, 256, requires_grad=True)
    labels = torch.randint(0, 50257, (1024,))

    def usual() -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")

    def ours() -> Tensor:
        return token_cross_entropy(hidden, weight, labels, vocab_size=50257)

    def seconds(loss: Callable[[], Tensor]) -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            value = loss()
        torch.autograd.grad(value, (hidden, weight))
        return time.perf_counter() - start

    rounds = [(seconds(ours), seconds(usual)) for _ in range(8)]
    best_of_ours, best_of_usual = map(min, zip(*rounds, strict=True))
    assert best_of_ours < 1.05 * best_of_usual


def test_losses_of_logits_in_slices() -> None:
    """A function of logits, here a distillation's, sees chunks and gives what it gives of all logits at once."""
    hidden, weight, labels = make(70)
    teacher = torch.randn(70, VOCAB, generator=torch.Generator().manual_seed(1)).softmax(-1)
    largest = 0

    def divergence(logits: Tensor, tokens: slice) -> Tensor:
        nonlocal largest
        largest = max(largest, len(logits))
        return F.kl_div(logits.log_softmax(-1), teacher[tokens].to(logits), reduction="none").sum(-1)

    def weighted(losses: Tensor) -> Tensor:
        return (losses * torch.arange(1.0, 71.0)).sum()

    for reduce in (None, weighted):
        every = F.linear(hidden.double(), weight.double())[:, :VOCAB]
        apart, largest = divergence(every, slice(None)).masked_fill(labels == -100, 0.0), 0
        loss = token_cross_entropy(
            hidden, weight, labels, vocab_size=VOCAB, chunk_tokens=16, token_losses=divergence, reduce=reduce
        )
        expected = apart.sum() if reduce is None else weighted(apart)
        assert largest == 16
        assert_matches(loss, expected, (hidden, weight), 1e-5)
