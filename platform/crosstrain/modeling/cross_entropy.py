"""Cross-entropy of a language-model head whose logits never exist all at once.

A vocabulary of 50,000 makes the logits, and their gradient, the largest tensors of a training step. Here a chunk of
tokens goes all the way from logits to both gradients before the next one starts, so one chunk's buffer is the whole
cost, and no matrix product is done twice. The gradients are computed in the forward, where the loss's own incoming
gradient is not yet known: being a scalar, it multiplies them afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crosstrain.utils.types import IGNORE_INDEX

# fp16 keeps nothing below 6e-8, a probability that is common in a large vocabulary. The gradient of a logit lies in
# [-1, 1], so it can be lifted by this much and never overflow; products of it are fp32, where it is taken out again.
_FP16_LIFT = 2.0**15

# Rows of logits that go through the softmax together on a CPU: small enough to stay in the cache in fp32.
CPU_SOFTMAX_ROWS = 32


@dataclass(frozen=True)
class Logits:
    """Logits of a head: softcap * tanh(scale * (hidden @ weight.T + bias) / softcap); without the parts not given."""

    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, products: Tensor) -> Tensor | float | None:
        """Turn products [n, V], without the bias, into logits in place; returns their derivative, None for 1."""
        if self.bias is not None:
            products.add_(self.bias.to(products.dtype))
        if self.softcap is None:
            if self.scale == 1:
                return None
            products.mul_(self.scale)
            return self.scale
        products.mul_(self.scale / self.softcap).tanh_()
        slope = products.square().neg_().add_(1.0).mul_(self.scale)
        products.mul_(self.softcap)
        return slope


PLAIN = Logits()
Reduce = Callable[[Tensor], Tensor]  # of the tokens' losses, 0 where there is no target
Hits = Callable[[Tensor], None]  # takes booleans [targets]: True where the target is the likeliest token


def token_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, vocab_size: int | None = None, chunk_tokens: int = 1024,
    group: dist.ProcessGroup | None = None, logits: Logits = PLAIN, traced_rows: int | None = None,
    reduce: Reduce | None = None, hits: Hits | None = None,
) -> Tensor:  # fmt: skip
    """Sum over target tokens of -log softmax(hidden @ weight.T)[label], an fp32 scalar (fp64 for fp64 inputs).

    hidden [*, H]; weight [V, H] of the head, whose rows from `vocab_size` on are padding without probability; labels
    [*] int64, IGNORE_INDEX where there is no target; `logits` turns the products into logits. Matrix products are in
    autocast's dtype where it is enabled, the softmax and the sums over chunks in fp32 or better. Memory beyond the
    gradients: one chunk's logits, `chunk_tokens` x V, and the same again with a softcap.

    With a `group` of P ranks, rank r holds the rows [V/P, H] of `weight` from r V/P on, and the same part of a bias.
    Two numbers per token are exchanged, never logits. Every rank returns the loss; its gradient of `hidden` is one term
    of the sum over the ranks. Collective.

    With `reduce`, return its value for the tokens' losses, which have the shape of `labels`, in place of their sum. Its
    gradient is a factor for each token, so the logits are computed twice: for the losses, and for the gradients.

    `hits` is called with True for each target that is the likeliest token.

    `traced_rows` is for tracing memory without values: of each chunk only so many rows go through the softmax, all at
    once, because the memory of all others is the same after the first ones' is free.

    Can be differentiated once, with respect to `hidden`, `weight` and the bias. Raises ValueError for shapes that do
    not match, and what `torch.gather` raises for a label outside the vocabulary.
    """
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1:] != weight.shape[1:]:
        shapes = f"hidden {[*hidden.shape]}, weight {[*weight.shape]} and labels {[*labels.shape]}"
        raise ValueError(f"{shapes} do not match: expected [*, H], [V, H] and [*]")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    first = 0 if group is None else dist.get_rank(group) * len(weight)
    rows = len(weight) if vocab_size is None else min(max(vocab_size - first, 0), len(weight))
    inputs = hidden, weight, logits.bias
    needed = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype

    def run(needed: tuple[bool, ...], factors: Tensor | None = None, each: bool = False) -> Tensor:
        return _TokenCrossEntropy.apply(
            hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), rows, chunk_tokens, dtype, first, group,
            logits, traced_rows, logits.bias, needed, factors, each, hits if factors is None else None,
        )  # fmt: skip

    if reduce is None:
        return run(needed)
    losses = run((False,) * 3, each=True).view(labels.shape).requires_grad_()
    with torch.enable_grad():
        value = reduce(losses)
    if not any(needed):
        return value.detach()
    (factors,) = torch.autograd.grad(value, losses)
    linear = run(needed, factors.reshape(-1))
    return linear + (value - linear).detach()


class Head:
    """The end of a language model: its loss, or the logits of the next token.

    A model calls its `head`, so that a runner that spreads the vocabulary over ranks can put another in its place.
    """

    traced_rows: int | None = None  # of `token_cross_entropy`; set by the plan alone
    reduce: Reduce | None = None  # of `token_cross_entropy`; set by an objective
    hits: Hits | None = None  # of `token_cross_entropy`; set by an evaluation

    def __call__(
        self, hidden: Tensor, weight: Tensor | None, labels: Tensor | None, vocab_size: int, logits: Logits = PLAIN
    ) -> Tensor:
        """Return `token_cross_entropy` of labels [batch, length], or fp32 logits [batch, vocab_size] without them.

        hidden [batch, length, H]; weight [V, H], of which rows from `vocab_size` on are padding, as of a bias. The
        logits are those after the last position. Without a weight, `hidden` holds the logits [batch, length, V]
        themselves, which the model's own head has computed.
        """
        if weight is None:
            return self._of_whole(hidden[..., :vocab_size], labels)
        if labels is not None:
            return token_cross_entropy(
                hidden, weight, labels, vocab_size=vocab_size, logits=logits, traced_rows=self.traced_rows,
                reduce=self.reduce, hits=self.hits,
            )  # fmt: skip
        last = nn.functional.linear(hidden[:, -1], weight[:vocab_size]).float()
        replace(logits, bias=None if logits.bias is None else logits.bias[:vocab_size]).apply_(last)
        return last

    def _of_whole(self, logits: Tensor, labels: Tensor | None) -> Tensor:
        """`__call__` for all logits [batch, length, vocab_size]."""
        if labels is None:
            return logits[:, -1].float()
        if self.hits is not None:
            given = labels != IGNORE_INDEX
            self.hits(logits[given].argmax(-1) == labels[given])
        rows = logits.flatten(0, 1).to(_exact(logits.dtype))
        losses = nn.functional.cross_entropy(rows, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return losses.sum() if self.reduce is None else self.reduce(losses.view(labels.shape))

    def add(self, result: Tensor, loss: Tensor) -> Tensor:
        """Add another loss, of modules before the head, to its result for targets."""
        return result + loss


class _TokenCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, chunk_tokens: int, dtype: torch.dtype,
        first: int, group: dist.ProcessGroup | None, head: Logits, traced_rows: int | None,
        _bias: Tensor | None,  # of `head`, so that it has a gradient
        needed: tuple[bool, ...], factors: Tensor | None, each: bool, hits: Hits | None,
    ) -> Tensor:  # fmt: skip
        """Sum the tokens' losses times `factors`; with `each`, which cannot be differentiated, return all [n]."""
        ctx.lift = _FP16_LIFT if dtype == torch.float16 else 1.0
        ctx.dtypes = hidden.dtype, weight.dtype, weight.dtype
        exact = _exact(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            low_hidden, low_weight = hidden.to(dtype), weight.to(dtype)
            ignored = labels == IGNORE_INDEX
            losses = torch.empty(len(hidden), dtype=exact, device=hidden.device)
            right = torch.empty_like(ignored)
            grad_hidden = torch.empty_like(hidden, dtype=exact) if needed[0] else None
            grad_weight = grad_bias = None
            buffer = low_hidden.new_empty(min(chunk_tokens, len(hidden)), len(weight))
            for start in range(0, len(hidden), chunk_tokens):
                chunk = slice(start, start + chunk_tokens)
                h, skip = low_hidden[chunk], ignored[chunk, None]
                logits = torch.mm(h, low_weight.T, out=buffer[: len(h)])
                slope = head.apply_(logits)
                logits[:, rows:] = -torch.inf
                if hits is not None:
                    right[chunk] = _likeliest(logits, first, group) == labels[chunk]
                targets = labels[chunk, None].masked_fill(skip, 0)
                lift = ctx.lift if any(needed) else None
                part = slice(traced_rows)
                at_once = traced_rows or (CPU_SOFTMAX_ROWS if hidden.device.type == "cpu" else max(len(h), 1))
                if group is None:
                    found = _losses_and_gradient(logits[part], targets[part], lift, at_once)
                else:
                    found = _losses_and_gradient_of_share(logits[part], targets[part] - first, lift, at_once, group)
                if traced_rows is not None:
                    found = found.new_empty(len(h))
                losses[chunk] = found
                del found
                if slope is not None and lift is not None:
                    logits.mul_(slope)
                # Tokens without a target are taken out of the products: their rows of logits would be a whole pass.
                if grad_hidden is not None:
                    grad_hidden[chunk] = _exact_mm(logits, low_weight).masked_fill_(skip, 0.0)
                h, ones = h.masked_fill(skip, 0.0), (~skip).to(dtype)
                if factors is not None:  # not into the logits, which fp16 would not hold
                    factor = factors[chunk, None].masked_fill(skip, 0.0)
                    losses[chunk] *= factor[:, 0]
                    h, ones = h * factor.to(dtype), factor.to(dtype)
                    if grad_hidden is not None:
                        grad_hidden[chunk] *= factor
                if needed[1]:
                    grad_weight = _exact_addmm(grad_weight, logits.T, h)
                if needed[2]:
                    grad_bias = _exact_addmm(grad_bias, logits.T, ones)
            if needed[1] and grad_weight is None:  # not one token
                grad_weight = torch.zeros_like(weight, dtype=exact)
            if needed[2]:
                grad_bias = torch.zeros_like(weight[:, 0], dtype=exact) if grad_bias is None else grad_bias[:, 0]
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        losses.masked_fill_(ignored, 0.0)
        if hits is not None:
            hits(right[~ignored])
        return losses if each else losses.sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        factor = grad_loss / ctx.lift
        # In place for the memory's sake: saved tensors are versioned, so a second backward is an error, not a wrong
        # result.
        hidden, weight, bias = (
            None if grad is None else grad.mul_(factor).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return hidden, weight, *[None] * 8, bias, *[None] * 4


def _likeliest(logits: Tensor, first: int, group: dist.ProcessGroup | None) -> Tensor:
    """The id [n] of each row's highest logit; the columns of `logits` [n, V/P] begin with the id `first`."""
    highest, ids = logits.max(-1)
    if group is None:
        return ids
    mine = torch.stack([highest.double(), (ids + first).double()])
    shares = mine.new_empty(dist.get_world_size(group), *mine.shape)
    dist.all_gather_single(shares.view(-1, mine.shape[1]), mine, group=group)
    return shares[:, 1].gather(0, shares[:, 0].argmax(0, keepdim=True))[0].long()


def _losses_and_gradient(logits: Tensor, targets: Tensor, lift: float | None, rows: int) -> Tensor:
    """Loss of each row of `logits`, which become `lift` x the gradient of the losses' sum unless `lift` is None.

    logits [n, V]; targets [n, 1], each in range(V); `rows` go through the softmax at once.
    """
    losses = []
    # On a CPU one small buffer stays in the cache, and reading bf16 once is faster than reducing it.
    buffer = torch.empty_like(logits[:rows], dtype=_exact(logits.dtype)) if logits.device.type == "cpu" else None
    for x, target in zip(logits.split(rows), targets.split(rows), strict=True):
        given = x if buffer is None else buffer[: len(x)].copy_(x)
        highest = given.amax(-1)
        p = torch.softmax(given, dim=-1, dtype=_exact(logits.dtype), out=None if buffer is None else given)
        # The largest probability is never tiny, so its logarithm gives the log-sum-exp without another pass of exp.
        log_sum_exp = highest - p.amax(-1).log()
        losses.append(log_sum_exp - x.gather(1, target)[:, 0])
        if lift is not None:
            p.scatter_add_(1, target, p.new_full(target.shape, -1.0))
            x.copy_(p if lift == 1.0 else p.mul_(lift))
    return torch.cat(losses)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """The type of a softmax, and of sums, where products are of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def _losses_and_gradient_of_share(
    logits: Tensor, targets: Tensor, lift: float | None, rows: int, group: dist.ProcessGroup
) -> Tensor:
    """`_losses_and_gradient` for columns that are sharded over `group`.

    logits [n, V/P]; targets [n, 1], relative to this share's first column, and so outside of it on all ranks but one.
    """
    exact = _exact(logits.dtype)
    here = (targets >= 0) & (targets < logits.shape[1])
    columns = targets.masked_fill(~here, 0)
    log_sums = torch.cat([x.to(exact).logsumexp(-1) for x in logits.split(rows)])
    of_targets = logits.gather(1, columns).to(exact).masked_fill(~here, 0.0)[:, 0]
    mine = torch.stack([log_sums, of_targets])
    all_shares = mine.new_empty(dist.get_world_size(group), *mine.shape)
    dist.all_gather_single(all_shares.view(-1, mine.shape[1]), mine, group=group)
    log_sum = all_shares[:, 0].logsumexp(0)
    if lift is not None:
        parts = (t.split(rows) for t in (logits, log_sum, columns, here))
        for x, whole, column, mark in zip(*parts, strict=True):
            p = (x.to(exact) - whole[:, None]).exp_()
            p.scatter_add_(1, column, -mark.to(p.dtype))
            x.copy_(p if lift == 1.0 else p.mul_(lift))
    return log_sum - all_shares[:, 1].sum(0)


def _exact_mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b without fp16's overflow; in fp32 where the device can leave low-precision products in it."""
    if a.device.type == "cuda" and a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float()) if a.dtype == torch.float16 else torch.mm(a, b)


def _exact_addmm(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b, summed in at least fp32; `total`, unless it is None, is overwritten."""
    if total is None:
        return _exact_mm(a, b).to(_exact(a.dtype))
    return total.addmm_(a, b) if total.dtype == a.dtype else total.add_(_exact_mm(a, b))
