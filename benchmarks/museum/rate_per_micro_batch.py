"""The schedule advances with every micro batch instead of every step.

https://github.com/huggingface/accelerate/issues/963
"""

import math

from crosstrain import registry

from . import Expected

EXPECTED = Expected("learning rate", cause=r"micro batch")


@registry.register_runner("rate_per_micro_batch")
class RatePerMicroBatch(registry.get("runner", "ddp")):
    """Advances the cosine schedule by one step per micro batch."""

    def set_learning_rate(self, rate):
        run = self.run
        accumulation = run.global_batch_size // (run.micro_batch_size * self.dp.size)
        angle = math.acos(2 * rate / run.init_lr - 1) * accumulation  # on the cosine's way down
        super().set_learning_rate(run.init_lr * (1 + math.cos(angle)) / 2)
