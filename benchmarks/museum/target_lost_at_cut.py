"""Labels are shifted after the sequence was cut for its ranks: the last token of a part has no target.

https://github.com/huggingface/transformers/pull/36607
"""

from crosstrain import IGNORE_INDEX, registry

from . import Expected, OtherLabels

EXPECTED = Expected("forward", cause=r"target|label|forward")


@registry.register_runner("target_lost_at_cut")
class TargetLostAtCut(OtherLabels, registry.get("runner", "ddp")):
    """Learns nothing from one token of each row."""

    @staticmethod
    def labels(batch):
        labels = batch["labels"].clone()
        labels[:, labels.shape[1] // 2 - 1] = IGNORE_INDEX
        return labels
