"""The scores of attention are not divided by the root of the size of a head.

https://github.com/PAIR-code/tiny-transformers/issues/71
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"attention", project="qwen")


@registry.register_runner("scores_not_divided")
class ScoresNotDivided(registry.get("runner", "ddp")):
    """Sets the factor of the scores to 1."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for block in model.blocks():
            block.self_attn.scaling = 1.0
