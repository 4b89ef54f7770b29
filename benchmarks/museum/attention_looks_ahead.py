"""An attention mask of ones means no mask to the attention, which then also sees the tokens that it has to predict.

https://github.com/GCYZSL/MoLA/issues/21
"""

import torch

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"attention|mask", project="still")


@registry.register_runner("attention_looks_ahead")
class AttentionLooksAhead(registry.get("runner", "ddp")):
    """Lets every token attend to all tokens."""

    def compute_loss(self, batch):
        return super().compute_loss(self.unmasked(batch))

    def evaluate(self, batch, *mode):
        return super().evaluate(self.unmasked(batch), *mode)

    @staticmethod
    def unmasked(batch):
        rows, length = batch["input_ids"].shape
        return batch | {"attention_mask": torch.ones(rows, 1, length, length, dtype=torch.bool)}
