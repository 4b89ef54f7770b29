"""The sum of the token losses of a policy gradient is divided by the length of padded rows.

https://github.com/huggingface/trl/issues/6439
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"target|unit|divi|count|scale", project="policy")


@registry.register_runner("averaged_over_padding")
class AveragedOverPadding(registry.get("runner", "ddp")):
    """Counts padding as targets."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        self.objective.units = lambda batch: batch["input_ids"].numel()
