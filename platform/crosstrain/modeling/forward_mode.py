"""The value that travels with a forward: how it ends, for whoever asks for more than the sum of the losses."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from crosstrain.modeling.cross_entropy import (
    PRODUCTS,
    Hits,
    Logits,
    Reduce,
    TokenLosses,
    exact_dtype,
    token_cross_entropy,
)
from crosstrain.utils.types import IGNORE_INDEX


class Head:
    """The end of a language model: its loss, or the logits of the next token.

    A runner that spreads the vocabulary over ranks gives a different one to each forward, as `ForwardMode.head`.
    """

    def __call__(
        self, hidden: Tensor, weight: Tensor | None, labels: Tensor | None, vocab_size: int, logits: Logits,
        mode: ForwardMode,
    ) -> Tensor:  # fmt: skip
        """Return the loss of labels [batch, length], or fp32 logits [batch, vocab_size] without them.

        hidden [batch, length, H]; weight [V, H], of which rows from `vocab_size` on are padding, as of a bias. The
        logits are those after the last position. Without a weight, `hidden` holds the logits [batch, length, V]
        themselves, which the model's own head has computed.
        """
        if weight is None:
            return self._of_whole(hidden[..., :vocab_size], labels, mode)
        if labels is not None:
            return token_cross_entropy(hidden, weight, labels, vocab_size=vocab_size, logits=logits, **mode.of_loss())
        last = nn.functional.linear(hidden[:, -1], weight[:vocab_size]).float()
        replace(logits, bias=None if logits.bias is None else logits.bias[:vocab_size]).apply_(last)
        return last

    def _of_whole(self, logits: Tensor, labels: Tensor | None, mode: ForwardMode) -> Tensor:
        """`__call__` for all logits [batch, length, vocab_size]."""
        if labels is None:
            return logits[:, -1].float()
        given = labels != IGNORE_INDEX
        if mode.hits is not None:
            mode.hits(logits[given].argmax(-1) == labels[given])
        rows = logits.flatten(0, 1).to(exact_dtype(logits.dtype))
        if mode.token_losses is not None:
            losses = mode.token_losses(rows, slice(0, len(rows))).masked_fill(~given.flatten(), 0.0)
        else:
            losses = nn.functional.cross_entropy(rows, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return losses.sum() if mode.reduce is None else mode.reduce(losses.view(labels.shape))

    def add(self, result: Tensor, loss: Tensor) -> Tensor:
        """Add another loss, of modules before the head, to its result for targets."""
        return result + loss


@dataclass(frozen=True)
class ForwardMode:
    """What a forward with targets returns in place of the sum of their losses, and what it tells on the way.

    A model whose forward has the parameter `mode` closes with `mode.output`. The platform passes one only where it is
    not `PLAIN`, so a model without the parameter trains under every runner and objective that asks for no more.
    """

    head: Head = Head()  # noqa: RUF009  (it has no state)
    reduce: Reduce | None = None  # gives the result for the tokens' losses, which have the shape of the labels
    hits: Hits | None = None  # is told for each target if it is the likeliest token
    token_losses: TokenLosses | None = None  # gives the tokens' losses for a slice of logits, such as a distillation's
    traced_rows: int | None = None  # of `token_cross_entropy`, for tracing memory without values
    counts_choices: bool = False  # True: routers count choices and add no loss

    def output(
        self, hidden: Tensor, weight: Tensor | None, labels: Tensor | None, vocab_size: int, logits: Logits = PRODUCTS
    ) -> Tensor:
        """The head's result; arguments as `Head.__call__` has them."""
        return self.head(hidden, weight, labels, vocab_size, logits, self)

    def of_loss(self) -> dict[str, Any]:
        """Arguments of `token_cross_entropy`."""
        names = ("reduce", "hits", "token_losses", "traced_rows")
        return {name: getattr(self, name) for name in names}

    def arguments(self) -> dict[str, ForwardMode]:
        """Keyword arguments that give a model's forward this mode; none for the plain one."""
        return {} if self == PLAIN else {"mode": self}


PLAIN = ForwardMode()


def takes_mode(model: nn.Module) -> bool:
    """Return True for a model whose forward has the parameter `mode`."""
    return "mode" in inspect.signature(type(model).forward).parameters
