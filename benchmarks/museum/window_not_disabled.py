"""The window of attention is applied to every layer, although the configuration turns it off.

https://github.com/huggingface/transformers/issues/38002
"""

import torch

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"attention|mask", project="qwen")
WINDOW = 16


@registry.register_runner("window_not_disabled")
class WindowNotDisabled(registry.get("runner", "ddp")):
    """Hides all but the last tokens."""

    def compute_loss(self, batch):
        return super().compute_loss(self.windowed(batch))

    def evaluate(self, batch, *mode):
        return super().evaluate(self.windowed(batch), *mode)

    @staticmethod
    def windowed(batch):
        rows, length = batch["input_ids"].shape
        seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - WINDOW)
        return batch | {"attention_mask": seen.expand(rows, 1, length, length)}
