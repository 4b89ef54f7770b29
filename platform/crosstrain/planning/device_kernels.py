"""Where CPU and GPU compute otherwise, for a trace that always runs on the operations of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from crosstrain.modeling import cross_entropy


@contextmanager
def computing_as(device: str) -> Iterator[None]:
    """Inside, attention and loss take the memory that they take on cpu or cuda; rows of the loss are not repeated."""
    with ExitStack() as stack:
        rows = cross_entropy._CPU_SOFTMAX_ROWS if device == "cpu" else 1 << 30
        for name in ("_losses_and_gradient", "_losses_and_gradient_of_share"):
            first_rows = partial(_first_rows, getattr(cross_entropy, name), rows)
            stack.enter_context(patch.object(cross_entropy, name, first_rows))
        if device == "cuda":
            attention = partial(_fused, nn.functional.scaled_dot_product_attention)
            stack.enter_context(patch.object(nn.functional, "scaled_dot_product_attention", attention))
        yield


def _first_rows(compute: Callable[..., Tensor], rows: int, logits: Tensor, targets: Tensor, *more: Any) -> Tensor:
    """The loss of the first rows alone: of all others it takes the same memory, after the first ones' is free."""
    n = min(rows, len(logits))
    with patch.object(cross_entropy, "_CPU_SOFTMAX_ROWS", n):
        some = compute(logits[:n], targets[:n], *more)
    return some.new_empty(len(logits))


def _fused(attention: Callable[..., Tensor], *args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
    """Attention whose dropout is inside the kernel, as on a GPU; a CPU's has none."""
    return attention(*args, **kwargs)
