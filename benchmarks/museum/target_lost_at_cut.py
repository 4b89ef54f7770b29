"""Labels are shifted after the sequence was cut for its ranks: the last token of a part has no target.

https://github.com/huggingface/transformers/pull/36607
"""

from crosstrain import IGNORE_INDEX, Model, registry

from . import Expected

EXPECTED = Expected("forward", cause=r"target|label|forward")


@registry.register_runner("target_lost_at_cut")
class TargetLostAtCut(registry.get("runner", "ddp")):
    """Learns nothing from one token of each row."""

    @staticmethod
    def labels(batch):
        labels = batch["labels"].clone()
        labels[:, labels.shape[1] // 2 - 1] = IGNORE_INDEX
        return labels

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        model.num_targets = lambda batch: Model.num_targets({"labels": self.labels(batch)})

    def to_device(self, batch):
        return super().to_device(batch | {"labels": self.labels(batch)})
