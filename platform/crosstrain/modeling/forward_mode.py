"""Forward modes select the result that a model returns. By default, the result is the sum of the losses."""

import inspect
import math
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


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """Return rows @ weight.T for rows [n, H] and a weight [V, H].

    On a CPU, a matmul with few rows uses one thread. A batched matmul of the weight's parts uses all threads.
    """
    parts = weight.unflatten(0, (math.gcd(len(weight), 64), -1)) if rows.device.type == "cpu" else weight[None]
    return parts.bmm(rows.T.expand(len(parts), -1, -1)).flatten(0, 1).T


class Head:
    """The last step of a language model: computes the loss, or the logits of the next token.

    A runner that shards the vocabulary passes its own head to each forward as `ForwardMode.head`.
    """

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        labels: Tensor | None,
        vocab_size: int,
        logits: Logits,
        mode: "ForwardMode",
    ) -> Tensor:
        """Return the loss for labels [batch, length]; without labels, fp32 logits [batch, vocab_size].

        hidden: [batch, length, H]. weight: [V, H]. In `weight` and the bias, rows `vocab_size` and above are padding.
        Logits are returned for the last position only. If `weight` is None, `hidden` holds the logits
        [batch, length, V] computed by the model's own head.
        """
        if weight is None:
            return self._of_whole(hidden[..., :vocab_size], labels, mode)
        if labels is not None:
            return token_cross_entropy(hidden, weight, labels, vocab_size=vocab_size, logits=logits, **mode.of_loss())
        last = _product(hidden[:, -1], weight)[:, :vocab_size].float()
        replace(logits, bias=None if logits.bias is None else logits.bias[:vocab_size]).apply_(last)
        return last

    def _of_whole(self, logits: Tensor, labels: Tensor | None, mode: "ForwardMode") -> Tensor:
        """Implement `__call__` for full logits [batch, length, vocab_size]."""
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
        """Add the loss of modules before the head, such as routers, to the head's loss."""
        return result + loss


@dataclass(frozen=True)
class ForwardMode:
    """Options of a forward with targets. By default, the forward returns the sum of the losses.

    A forward that takes the parameter `mode` returns the result of `mode.output`. The platform passes only modes that
    differ from `PLAIN`. A model without this parameter therefore works with all runners and objectives that use only
    `PLAIN`.
    """

    head: Head = Head()  # noqa: RUF009  (a Head has no state)
    reduce: Reduce | None = None  # reduces token losses [batch, length] to the returned value; None: to their sum
    hits: Hits | None = None  # called with one boolean per target: True if the target has the highest logit
    token_losses: TokenLosses | None = None  # computes token losses, e.g. for distillation; None: -log p
    traced_rows: int | None = None  # argument of `token_cross_entropy`, for memory traces of tensors without data

    def output(
        self, hidden: Tensor, weight: Tensor | None, labels: Tensor | None, vocab_size: int, logits: Logits = PRODUCTS
    ) -> Tensor:
        """Return the result of the head; for the arguments, see `Head.__call__`."""
        return self.head(hidden, weight, labels, vocab_size, logits, self)

    def of_loss(self) -> dict[str, Any]:
        """Return this mode's keyword arguments for `token_cross_entropy`."""
        return {name: getattr(self, name) for name in ("reduce", "hits", "token_losses", "traced_rows")}

    def arguments(self) -> "dict[str, ForwardMode]":
        """Return keyword arguments that pass this mode to a model's forward; empty for `PLAIN`."""
        return {} if self == PLAIN else {"mode": self}


PLAIN = ForwardMode()


def takes_mode(model: nn.Module) -> bool:
    """Return True if the model's forward has the parameter `mode`."""
    return "mode" in inspect.signature(type(model).forward).parameters
