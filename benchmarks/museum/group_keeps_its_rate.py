"""The schedule sets the learning rate of only the first parameter group.

https://github.com/deepspeedai/DeepSpeedExamples/pull/756
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("learning rate", cause=r"group|learning rate")


@registry.register_runner("group_keeps_its_rate")
class GroupKeepsItsRate(registry.get("runner", "ddp")):
    """Keeps biases and norms at the initial rate."""

    def set_learning_rate(self, rate):
        super().set_learning_rate(rate)
        self.optimizer.param_groups[-1]["lr"] = self.run.init_lr
