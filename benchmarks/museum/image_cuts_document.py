"""Positions of image tokens are taken as positions of text, so each token of an image seems to begin a document.

https://github.com/huggingface/transformers/pull/40490
"""

import torch

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"attention|mask|position|document|forward", project="still")
IMAGE = slice(8, 17)  # tokens that seem to begin a document


@registry.register_runner("image_cuts_document")
class ImageCutsDocument(registry.get("runner", "ddp")):
    """Hides tokens before and in the image from later tokens."""

    def compute_loss(self, batch):
        return super().compute_loss(self.cut(batch))

    def evaluate(self, batch, *mode):
        return super().evaluate(self.cut(batch), *mode)

    @staticmethod
    def cut(batch):
        rows, length = batch["input_ids"].shape
        starts = torch.zeros(length, dtype=torch.long)
        starts[IMAGE] = 1
        number = starts.cumsum(0)
        seen = (number[:, None] == number).tril()
        return batch | {"attention_mask": seen.expand(rows, 1, length, length)}
