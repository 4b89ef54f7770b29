"""The labels are shifted by the model and again by its loss, so each token has to predict the second next token.

https://github.com/huggingface/transformers/pull/47395
"""

from torch.nn.functional import pad

from crosstrain import IGNORE_INDEX, registry

from . import Expected, OtherLabels

EXPECTED = Expected("forward", cause=r"target|label|shift", project="still")


@registry.register_runner("labels_shifted_twice")
class LabelsShiftedTwice(OtherLabels, registry.get("runner", "ddp")):
    """Shifts the targets by another token."""

    @staticmethod
    def labels(batch):
        return pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
