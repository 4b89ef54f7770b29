"""Labels are shifted after the sequence is split over ranks, so the last token of each part has no target.

https://github.com/huggingface/transformers/pull/36607
"""

from crosstrain import IGNORE_INDEX, registry

from . import Expected, OtherLabels

EXPECTED = Expected("forward", cause=r"target|label|forward")


@registry.register_runner("target_lost_at_cut")
class TargetLostAtCut(OtherLabels, registry.get("runner", "ddp")):
    """Drops one target of each row."""

    @staticmethod
    def labels(batch):
        labels = batch["labels"].clone()
        labels[:, labels.shape[1] // 2 - 1] = IGNORE_INDEX
        return labels
