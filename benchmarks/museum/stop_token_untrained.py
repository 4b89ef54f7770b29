"""The mask excludes the token that ends the assistant's turn, so the model never learns to stop.

https://github.com/huggingface/trl/pull/5988
"""

from crosstrain import IGNORE_INDEX, registry

from . import Expected, OtherLabels

EXPECTED = Expected("forward", cause=r"target|label|mask", project="chat")


@registry.register_runner("stop_token_untrained")
class StopTokenUntrained(OtherLabels, registry.get("runner", "ddp")):
    """Drops the last target of each turn."""

    @staticmethod
    def labels(batch):
        labels = batch["labels"].clone()
        labels[:, :-1][batch["labels"][:, 1:] == IGNORE_INDEX] = IGNORE_INDEX
        return labels
