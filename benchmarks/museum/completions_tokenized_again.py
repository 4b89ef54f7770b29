"""Completions are decoded and tokenized again, so the learned tokens are not always the sampled ones.

https://github.com/huggingface/trl/issues/5224
"""

from crosstrain import IGNORE_INDEX, registry

from . import Expected, OtherSamples

EXPECTED = Expected("samples", cause=r"sampl|completion", project="policy")


@registry.register_runner("completions_tokenized_again")
class CompletionsTokenizedAgain(OtherSamples, registry.get("runner", "ddp")):
    """Replaces one of two tokens that have the same text with the other."""

    @staticmethod
    def change(batch):
        labels, ids = batch["labels"], batch["input_ids"]
        labels[labels == 3] = 4
        learned = labels.roll(1, -1) != IGNORE_INDEX
        ids[learned & (ids == 3)] = 4
