"""A chat template does not mark the generated text, so the mask is all ones: prompts are learned too.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/3359
"""

from crosstrain import IGNORE_INDEX, registry

from . import Expected, OtherLabels

EXPECTED = Expected("forward", cause=r"target|label|mask", project="chat")


@registry.register_runner("all_words_are_targets")
class AllWordsAreTargets(OtherLabels, registry.get("runner", "ddp")):
    """Makes every word a target."""

    @staticmethod
    def labels(batch):
        labels, following = batch["labels"].clone(), batch["input_ids"][:, 1:]
        labels[:, :-1] = labels[:, :-1].where(labels[:, :-1] != IGNORE_INDEX, following)
        return labels
