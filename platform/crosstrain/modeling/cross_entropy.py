"""Chunked cross-entropy of a language-model head: the full logits are never materialized.

With a vocabulary of 50,000, the logits and their gradient are the largest tensors of a training step. Here the tokens
are processed in chunks: the logits and gradients of a chunk are computed before the next chunk starts, so only one
chunk's buffer is allocated, and no matmul is repeated. The gradients are computed in the forward, before the incoming
gradient of the loss is known. The incoming gradient is a scalar, so the backward only multiplies the stored
gradients by it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crosstrain.modeling.context import gathered
from crosstrain.modeling.meta_init import has_values
from crosstrain.utils.types import IGNORE_INDEX

# fp16 rounds values below 3e-8 to zero, and such probabilities are common in a large vocabulary. The gradient of a
# logit lies in [-1, 1], so multiplying it by this factor cannot overflow. Matmuls with this gradient have fp32 outputs,
# and the backward divides the outputs by the factor.
_FP16_LIFT = 2.0**15

# With `reduce`, gradients of logits up to this size are kept from the first pass for the second.
KEPT_BYTES = 256 << 20

# Number of rows of logits per softmax call on a CPU: small enough to stay in the cache in fp32.
CPU_SOFTMAX_ROWS = 32

# Elements of a product of the head's gradient that are held before they are added in another dtype.
_PART = 1 << 22


@dataclass(frozen=True)
class Logits:
    """A head's logits: softcap * tanh(scale * (hidden @ weight.T + bias) / softcap); bias and softcap are optional."""

    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, products: Tensor) -> Tensor | float | None:
        """Convert hidden @ weight.T [n, V] to logits in place. Return the derivative, or None if it is 1."""
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


PRODUCTS = Logits()
Reduce = Callable[[Tensor], Tensor]  # reduces the tokens' losses; tokens without a target have loss 0
Hits = Callable[[Tensor], None]  # called with booleans [targets]: True if the target is the argmax
TokenLosses = Callable[[Tensor, slice], Tensor]  # (logits [n, vocab_size], slice of these tokens) -> losses [n]


def token_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, vocab_size: int | None = None, chunk_tokens: int = 1024,
    group: dist.ProcessGroup | None = None, logits: Logits = PRODUCTS, traced_rows: int | None = None,
    reduce: Reduce | None = None, hits: Hits | None = None, token_losses: TokenLosses | None = None,
) -> Tensor:  # fmt: skip
    """Sum -log softmax(hidden @ weight.T)[label] over target tokens. Returns an fp32 scalar (fp64 for fp64 inputs).

    hidden: [*, H]. weight: [V, H], the weight of the head; rows `vocab_size` and above are padding and get no
    probability. labels: [*] int64, IGNORE_INDEX where there is no target. logits: converts hidden @ weight.T to logits.
    Matmuls use autocast's dtype if autocast is enabled; the softmax and the sums over chunks are in at least fp32.
    Memory: the gradients, and one chunk's logits, `chunk_tokens` x V (twice as much with a softcap). Tokens without a
    target are skipped, but not in training on a GPU, which would wait for their number.

    With a `group` of P ranks, rank r passes V/P rows of the head's weight and bias, starting at row r * V/P. The ranks
    exchange two values per token to compute the loss; they do not exchange logits, except for `token_losses`. Every
    rank returns the full loss; the full gradient of `hidden` is the sum of the ranks' gradients. Collective.

    `reduce` maps the token losses, in the shape of `labels`, to the returned value; the default is their sum. With
    `reduce`, there are two passes: first for the losses, then for the gradients, which need the derivative of `reduce`
    with respect to each loss. Logits of more than `KEPT_BYTES` are computed in both.

    `hits` is called with a boolean for each target: True if the target is the argmax.
    `token_losses` replaces -log softmax and must be differentiable. It gets a chunk's logits, in at least fp32, and
    the chunk's slice of the flattened labels. With a `group`, the ranks first gather the chunk's full logits.

    `traced_rows` is for memory traces of tensors without data: only this number of rows of each chunk goes through the
    softmax, in one call. The other rows would reuse the same memory.

    The result can be differentiated once. Raises ValueError for shapes that do not match, and the error of
    `torch.gather` for a label outside the vocabulary.
    """
    _check_shapes(hidden, weight, labels, chunk_tokens)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    first, columns, vocab_size = _columns(len(weight), vocab_size, group)
    plan = _Plan(first, columns, vocab_size, group, chunk_tokens, dtype, logits, traced_rows, hits, token_losses)
    inputs = hidden, weight, logits.bias
    needed = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs)
    rows, flat_labels, kept = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), None
    known = has_values(hidden) and token_losses is None and (device == "cpu" or not any(needed))
    at = _targets(flat_labels) if known else slice(None)
    rows, flat_labels = rows[at], flat_labels[at]

    def run(needed: tuple[bool, ...], factors: Tensor | None = None, each: bool = False) -> Tensor:
        return _TokenCrossEntropy.apply(rows, weight, flat_labels, logits.bias, plan, needed, factors, each, kept)

    if reduce is None:
        return run(needed)
    if any(needed) and flat_labels.numel() * len(weight) * dtype.itemsize <= KEPT_BYTES:
        kept = rows.new_empty(flat_labels.numel(), len(weight), dtype=dtype)
    found = run((False,) * 3, each=True)
    losses = found.new_zeros(labels.numel())
    losses[at] = found
    with torch.enable_grad():
        value = reduce(losses := losses.view(labels.shape).requires_grad_())
    if not any(needed):
        return value.detach()
    (factors,) = torch.autograd.grad(value, losses)
    linear = run(needed, factors.reshape(-1)[at])
    return linear + (value - linear).detach()


def _targets(labels: Tensor) -> Any:
    """Return the indices of the labels that are not ignored; all of them as a slice, which copies nothing."""
    at = (labels != IGNORE_INDEX).nonzero()[:, 0]
    return at if len(at) < len(labels) else slice(None)


def _columns(own: int, vocab_size: int | None, group: dist.ProcessGroup | None) -> tuple[int, int, int]:
    """Return a rank's first column, its number of columns without padding, and the size of the vocabulary."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    vocab_size = vocab_size or ranks * own
    return rank * own, min(max(vocab_size - rank * own, 0), own), vocab_size


def _check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> None:
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1:] != weight.shape[1:]:
        shapes = f"hidden {[*hidden.shape]}, weight {[*weight.shape]} and labels {[*labels.shape]}"
        raise ValueError(f"{shapes} do not match: expected [*, H], [V, H] and [*]")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")


@dataclass(frozen=True)
class _Plan:
    """Arguments of `token_cross_entropy`, and methods that compute losses and predictions from a chunk's logits."""

    first: int  # this rank's first column of the logits
    columns: int  # number of this rank's columns without padding
    vocab_size: int
    group: dist.ProcessGroup | None
    chunk_tokens: int
    dtype: torch.dtype  # dtype of the matmuls
    head: Logits
    traced_rows: int | None
    hits: Hits | None
    token_losses: TokenLosses | None

    def gradient_(
        self, products: Tensor, labels: Tensor, chunk: slice, lift: float | None, right: Tensor | None
    ) -> Tensor:
        """Return the losses [n] for a chunk of hidden @ weight.T [n, V/P], overwritten with the logits' gradient.

        right: if given, its chunk becomes True where the target is the argmax. See `losses_` for the rest.
        """
        slope = self.head.apply_(products)
        products[:, self.columns :] = -torch.inf
        if right is not None:
            right[chunk] = self.likeliest(products) == labels[chunk]
        losses = self.losses_(products, labels, chunk, lift)
        if slope is not None and lift is not None:
            products.mul_(slope)
        return losses

    def losses_(self, logits: Tensor, labels: Tensor, chunk: slice, lift: float | None) -> Tensor:
        """Return the losses [n] for a chunk's logits [n, V/P], and overwrite the logits with their gradient.

        lift: factor on the gradient of the sum of the losses; None: no gradient. labels: the labels of all tokens.
        Tokens without a target have arbitrary losses and gradients.
        """
        labels = labels[chunk]
        if self.token_losses is not None:
            return self._given_losses_(self.token_losses, logits, labels, chunk, lift)
        targets, part = labels[:, None].masked_fill(labels[:, None] == IGNORE_INDEX, 0), slice(self.traced_rows)
        at_once = self.traced_rows or (CPU_SOFTMAX_ROWS if logits.device.type == "cpu" else max(len(logits), 1))
        if self.group is None:
            found = _losses_and_gradient(logits[part], targets[part], lift, at_once)
        else:
            targets = targets - self.first
            found = _losses_and_gradient_of_share(logits[part], targets[part], lift, at_once, self.group)
        return found if self.traced_rows is None else found.new_empty(len(logits))

    def _given_losses_(
        self, function: TokenLosses, logits: Tensor, labels: Tensor, chunk: slice, lift: float | None
    ) -> Tensor:
        with torch.enable_grad():
            whole = logits if self.group is None else gathered(logits, self.group).transpose(0, 1).flatten(1)
            exact = (
                whole[:, : self.vocab_size].to(exact_dtype(logits.dtype), copy=True).requires_grad_(lift is not None)
            )
            found = function(exact, slice(chunk.start, chunk.start + len(logits)))
            total = found.sum()
        if lift is not None:
            (gradient,) = torch.autograd.grad(total, exact)
            gradient.masked_fill_(labels[:, None] == IGNORE_INDEX, 0.0)
            logits.zero_()
            logits[:, : self.columns] = gradient[:, self.first : self.first + self.columns].mul_(lift)
        return found.detach()

    def likeliest(self, logits: Tensor) -> Tensor:
        """Return the token ID [n] of each row's highest logit; `logits` [n, V/P] are this rank's share."""
        highest, ids = logits.max(-1)
        if self.group is None:
            return ids
        shares = gathered(torch.stack([highest.double(), (ids + self.first).double()]), self.group)
        return shares[:, 1].gather(0, shares[:, 0].argmax(0, keepdim=True))[0].long()


class _TokenCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        _bias: Tensor | None,  # the bias of `plan.head`, passed as an argument so that it gets a gradient
        plan: _Plan,
        needed: tuple[bool, ...],
        factors: Tensor | None,
        each: bool,
        kept: Tensor | None,
    ) -> Tensor:
        """Sum the losses, weighted by `factors`. If `each` is True, return all losses [n], without gradients.

        kept: gradients [n, V] of the logits, computed by the first call for the second.
        """
        first = factors is None  # the second call has `factors`; the first call has reported the hits
        dtype, hits = plan.dtype, plan.hits if first else None
        ctx.lift = _FP16_LIFT if dtype == torch.float16 else 1.0
        ctx.dtypes = hidden.dtype, weight.dtype, weight.dtype
        exact = exact_dtype(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            low_hidden, low_weight = hidden.to(dtype), weight.to(dtype)
            ignored = labels == IGNORE_INDEX
            losses = torch.zeros(len(hidden), dtype=exact, device=hidden.device)
            right = None if hits is None else torch.empty_like(ignored)
            grad_hidden = torch.empty_like(hidden, dtype=exact) if needed[0] else None
            grad_weight = torch.zeros_like(weight, dtype=exact) if needed[1] else None
            grad_bias = torch.zeros_like(weight[:, :1], dtype=exact) if needed[2] else None
            buffer = low_hidden.new_empty(min(plan.chunk_tokens, len(hidden)) * (kept is None), len(weight))
            lift = ctx.lift if any(needed) or kept is not None else None
            for start in range(0, len(hidden), plan.chunk_tokens):
                chunk = slice(start, start + plan.chunk_tokens)
                h, skip = low_hidden[chunk], ignored[chunk, None]
                logits = buffer[: len(h)] if kept is None else kept[chunk]
                if kept is None or first:
                    torch.mm(h, low_weight.T, out=logits)
                    losses[chunk] = plan.gradient_(logits, labels, chunk, lift, right)
                # Tokens without a target are masked in the matmuls, because masking the logits takes an extra pass.
                if grad_hidden is not None:
                    grad_hidden[chunk] = _exact_mm(logits, low_weight).masked_fill_(skip, 0.0)
                h, ones = h.masked_fill(skip, 0.0), (~skip).to(dtype)
                if factors is not None:  # the logits' gradient is not multiplied, because fp16 would underflow
                    factor = factors[chunk, None].masked_fill(skip, 0.0)
                    losses[chunk] *= factor[:, 0]
                    h, ones = h * factor.to(dtype), factor.to(dtype)
                    if grad_hidden is not None:
                        grad_hidden[chunk] *= factor
                if grad_weight is not None:
                    _add_product_(grad_weight, logits.T, h)
                if grad_bias is not None:
                    _add_product_(grad_bias, logits.T, ones)
        ctx.save_for_backward(grad_hidden, grad_weight, None if grad_bias is None else grad_bias[:, 0])
        losses.masked_fill_(ignored, 0.0)
        if hits is not None and right is not None:
            hits(right[~ignored])
        return losses if each else losses.sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        factor = grad_loss / ctx.lift
        # In place, to save memory. Autograd checks the version of saved tensors, so a second backward raises an error.
        hidden, weight, bias = (
            None if grad is None else grad.mul_(factor).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return hidden, weight, None, bias, *[None] * 5


def _losses_and_gradient(logits: Tensor, targets: Tensor, lift: float | None, rows: int) -> Tensor:
    """Return the losses of the rows of `logits`, and overwrite `logits` with `lift` x the gradient of the losses' sum.

    logits: [n, V]. targets: [n, 1], each in range(V). rows: rows per softmax call. If `lift` is None, no gradient is
    computed.
    """
    losses = []
    # On a CPU, a small buffer stays in the cache, and converting bf16 once is faster than reductions in bf16.
    buffer = torch.empty_like(logits[:rows], dtype=exact_dtype(logits.dtype)) if logits.device.type == "cpu" else None
    for x, target in zip(logits.split(rows), targets.split(rows), strict=True):
        given = x if buffer is None else buffer[: len(x)].copy_(x)
        highest = given.amax(-1)
        p = torch.softmax(given, dim=-1, dtype=exact_dtype(logits.dtype), out=None if buffer is None else given)
        # The largest probability is never tiny, so its logarithm gives the log-sum-exp without a second exp.
        log_sum_exp = highest - p.amax(-1).log()
        losses.append(log_sum_exp - x.gather(1, target)[:, 0])
        if lift is not None:
            p.scatter_add_(1, target, p.new_full(target.shape, -1.0))
            x.copy_(p if lift == 1.0 else p.mul_(lift))
    return torch.cat(losses)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the softmax and of sums if matmuls run in `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def _losses_and_gradient_of_share(
    logits: Tensor, targets: Tensor, lift: float | None, rows: int, group: dist.ProcessGroup
) -> Tensor:
    """Implement `_losses_and_gradient` for columns sharded over `group`.

    logits: [n, V/P]. targets: [n, 1], relative to this rank's first column; each target is in range on only one rank.
    """
    exact = exact_dtype(logits.dtype)
    here = (targets >= 0) & (targets < logits.shape[1])
    columns = targets.masked_fill(~here, 0)
    log_sums = torch.cat([x.to(exact).logsumexp(-1) for x in logits.split(rows)])
    of_targets = logits.gather(1, columns).to(exact).masked_fill(~here, 0.0)[:, 0]
    all_shares = gathered(torch.stack([log_sums, of_targets]), group)
    log_sum = all_shares[:, 0].logsumexp(0)
    if lift is not None:
        parts = (t.split(rows) for t in (logits, log_sum, columns, here))
        for x, whole, column, mark in zip(*parts, strict=True):
            p = (x.to(exact) - whole[:, None]).exp_()
            p.scatter_add_(1, column, -mark.to(p.dtype))
            x.copy_(p if lift == 1.0 else p.mul_(lift))
    return log_sum - all_shares[:, 1].sum(0)


def _exact_mm(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b without fp16 overflow: in fp32 for fp16 inputs, and on CUDA also for bf16 inputs."""
    if a.device.type == "cuda" and a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float()) if a.dtype == torch.float16 else torch.mm(a, b)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`. If their dtypes differ, the product is held in parts, because the whole would need memory.

    Adding a part while it is in the cache is also faster.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        rows = max(_PART // b.shape[1], 1)
        for part, own in zip(total.split(rows), a.split(rows), strict=True):
            part.add_(_exact_mm(own, b))
