"""Data parallelism whose ranks share sequences with a bug each, for `compare` to find."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from crosstrain_plugins.builtin.models.hugging_face import attention

from crosstrain import IGNORE_INDEX, registry
from crosstrain.modeling.context import Context

DDP = registry.get("runner", "ddp")


class ShiftedAfterTheCut(Context):
    """Each part's last token has its target in the next part, and loses it."""

    def part(self, x, padding=0):
        out = super().part(x, padding)
        if padding == IGNORE_INDEX:
            out = out.clone()
            out[:, -1] = IGNORE_INDEX
        return out


@registry.register_runner("shares_wrongly")
class SharesWrongly(DDP):
    """DDP with a chosen mistake."""

    @dataclass
    class Options(DDP.Options):
        bug: Literal["none", "mask", "labels", "averaged"] = "none"

    def prepare(self, model, make_optimizer):
        if self.options.bug == "mask":
            attention._sdpa = partial(attention._sdpa, is_causal=False)
        if self.options.bug == "labels":
            model.context = ShiftedAfterTheCut(model.context.group)
        super().prepare(model, make_optimizer)

    @property
    def gradient_scale(self):
        return super().gradient_scale * (self.context.size if self.options.bug == "averaged" else 1)
