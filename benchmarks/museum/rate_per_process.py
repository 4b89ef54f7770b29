"""Each process advances the schedule, which so runs as many times as fast as there are.

https://github.com/huggingface/accelerate/issues/1398
"""

import math

from crosstrain import registry

from . import Expected

EXPECTED = Expected("learning rate", cause=r"rank|process")


@registry.register_runner("rate_per_process")
class RatePerProcess(registry.get("runner", "ddp")):
    """Goes down the cosine by a step for each rank."""

    def set_learning_rate(self, rate):
        angle = math.acos(2 * rate / self.run.init_lr - 1) * self.world.size  # on the cosine's way down
        super().set_learning_rate(self.run.init_lr * (1 + math.cos(angle)) / 2)
