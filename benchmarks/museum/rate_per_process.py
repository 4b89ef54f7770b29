"""Each process advances the schedule, so with N processes the schedule runs N times too fast.

https://github.com/huggingface/accelerate/issues/1398
"""

import math

from crosstrain import registry

from . import Expected

EXPECTED = Expected("learning rate", cause=r"rank|process")


@registry.register_runner("rate_per_process")
class RatePerProcess(registry.get("runner", "ddp")):
    """Advances the cosine schedule by one step per rank."""

    def set_learning_rate(self, rate):
        angle = math.acos(2 * rate / self.run.init_lr - 1) * self.world.size  # on the cosine's way down
        super().set_learning_rate(self.run.init_lr * (1 + math.cos(angle)) / 2)
