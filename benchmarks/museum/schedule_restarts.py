"""The state of the schedule is not saved, so a resumed run begins with the initial learning rate.

https://github.com/lightly-ai/lightly-train/pull/301
"""

import math

from crosstrain import registry

from . import Expected

EXPECTED = Expected("resume", cause=r"rate|schedule")


@registry.register_runner("schedule_restarts")
class ScheduleRestarts(registry.get("runner", "ddp")):
    """Counts steps from the resumption on."""

    done = 0.0

    def loaded(self):
        super().loaded()
        self.done = max(float(state["step"]) for state in self.optimizer.state.values())

    def set_learning_rate(self, rate):
        angle = math.acos(2 * rate / self.run.init_lr - 1) - self.done * math.pi / self.run.lr_decay_iters
        super().set_learning_rate(self.run.init_lr * (1 + math.cos(angle)) / 2)
