"""The sampler draws only likely tokens, but reports their probabilities among all tokens.

https://github.com/huggingface/trl/issues/6789
"""

from crosstrain import registry

from . import Expected, OtherSamples

EXPECTED = Expected("samples", cause=r"sampl|probabilit", project="policy")


@registry.register_runner("likelier_tokens_unsaid")
class LikelierTokensUnsaid(OtherSamples, registry.get("runner", "ddp")):
    """Adds the logarithm of the probability of the tokens that were left out."""

    @staticmethod
    def change(batch):
        batch["sampled"] = batch["sampled"] - 0.1 * (batch["sampled"] < 0)
